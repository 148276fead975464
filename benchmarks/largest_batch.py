"""The largest batch that fits beside a model's weights, in 16 bits, with FP8 weights and with an FP8 cache: arithmetic.

    python benchmarks/largest_batch.py

The memory that weights leave, over what a sequence caches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LLAMA_3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
}
GPT_J = {
    "model_type": "gptj",
    "vocab_size": 50400,
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "n_positions": 2048,
    "rotary_dim": 64,
    "tie_word_embeddings": False,
}
LLAMA_3_70B = LLAMA_3_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
MODELS: dict[str, tuple[dict[str, Any], float]] = {
    "GPT-J 6B": (GPT_J, 56.5e9),
    "Llama 3 8B": (LLAMA_3_8B, 80e9 * 0.9),
    "Llama 3 8B, 24 GB": (LLAMA_3_8B, 24e9 * 0.9),
    "Llama 3 70B, two GPUs": (LLAMA_3_70B, 2 * 80e9 * 0.9),
}
"""What config.json says, and bytes for weights and cache: 0.9 of a GPU is what vLLM takes unless it is told otherwise;
for GPT-J it is what the 75 sequences of NVIDIA's table need, who do not say what they had."""

TOKENS = 1024 + 256
"""Of a sequence: 1024 read and 256 written, as in that table."""


@dataclass(frozen=True)
class Sizes:
    """How many parameters are weights of FP8 GEMMs, and how many are not; and how many numbers a token caches."""

    in_fp8: int
    others: int
    cached: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Sizes":
        """By the architecture's own table of rows."""
        from precisionctl.architectures.families import architecture_of, from_hf_config

        model = from_hf_config(dict(config))
        counts = [0, 0]
        for row in architecture_of(str(config["model_type"])).spelled({}, model):
            if row.present.in_layout("hf", model):
                numbers = sum(_product(shape) for shape in row.shapes(model, "hf"))
                counts[bool(row.gemm)] += numbers * len(list(row.places(model)))
        if model.mla:
            of_a_layer = model.mla.kv_lora_rank + model.mla.qk_pos_emb_head_dim
        else:
            of_a_layer = 2 * model.num_query_groups * model.kv_channels
        return cls(counts[1], counts[0], model.num_layers * of_a_layer)

    def weights(self, fp8: bool) -> int:
        """Bytes."""
        return self.in_fp8 * (1 if fp8 else 2) + self.others * 2

    def largest_batch(self, memory: float, tokens: int, *, fp8: bool, fp8_cache: bool) -> int:
        """Sequences of so many tokens whose cache fits beside the weights."""
        return max(0, int((memory - self.weights(fp8)) // (tokens * self.cached * (1 if fp8_cache else 2))))


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


KINDS = {"16 bits": (False, False), "FP8": (True, False), "FP8, FP8 cache": (True, True)}


def by_arithmetic() -> list[dict[str, Any]]:
    rows = []
    for name, (config, memory) in MODELS.items():
        sizes = Sizes.of(config)
        batches = {
            kind: sizes.largest_batch(memory, TOKENS, fp8=fp8, fp8_cache=cache) for kind, (fp8, cache) in KINDS.items()
        }
        weights = {"weights, GB": sizes.weights(False) / 1e9, "in FP8, GB": sizes.weights(True) / 1e9}
        rows.append({"model": name, "memory, GB": memory / 1e9, **weights, **batches})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of the same kind as Markdown."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        found = [row.get(key, "") for key in columns]
        lines.append([f"{value:,.1f}" if isinstance(value, float) else str(value) for value in found])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(f"The largest batch of {TOKENS} tokens, by arithmetic\n\n{table(by_arithmetic())}")
