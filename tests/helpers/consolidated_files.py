"""Tiny models in Mistral's own files and in Meta's, and what they compute: by the code that these were made for, in
mistral-inference 1.6 (transformer_layers.py, rope.py, moe.py) and meta-llama/llama (llama/model.py)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

DENSE: dict[str, Any] = {
    "dim": 64,
    "n_layers": 2,
    "head_dim": 24,
    "hidden_dim": 96,
    "n_heads": 4,
    "n_kv_heads": 2,
    "norm_eps": 1e-5,
    "vocab_size": 128,
    "rope_theta": 1000000.0,
}
EXPERTS = DENSE | {"moe": {"num_experts": 4, "num_experts_per_tok": 2}}
META: dict[str, Any] = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "norm_eps": 1e-5,
    "vocab_size": 128,
    "multiple_of": 32,
    "ffn_dim_multiplier": 1.3,
    "rope_theta": 500000.0,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "num_channels": 3,
    "image_size": 56,
    "patch_size": 14,
    "max_image_size": 56,
    "rope_theta": 10000.0,
    "image_token_id": 10,
    "image_break_token_id": 12,
    "image_end_token_id": 13,
    "spatial_merge_size": 2,
    "adapter_bias": False,
    "mm_projector_id": "patch_merge",
    "add_pre_mm_projector_layer_norm": True,
}
LATENT: dict[str, Any] = DENSE | {
    "head_dim": 32,
    "n_kv_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 256,
    "yarn": {"factor": 4, "original_max_position_embeddings": 64, "beta": 32, "alpha": 1, "apply_scale": False},
    "llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 64},
    "moe": {
        "expert_parallel": 1,
        "expert_model_parallel": 1,
        "route_every_n": 1,
        "first_k_dense_replace": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_expert_groups": 1,
        "num_expert_groups_per_tok": 1,
        "routed_scale": 1.0,
        "expert_hidden_dim": 48,
        "num_shared_experts": 1,
    },
}


def _mlp(place: str, inner: int, dim: int) -> dict[str, tuple[int, ...]]:
    return {f"{place}.w1": (inner, dim), f"{place}.w2": (dim, inner), f"{place}.w3": (inner, dim)}


def shapes(params: dict[str, Any], inner: int = 0) -> dict[str, tuple[int, ...]]:
    """The tensors of a model without `.weight`; `inner` is Meta's size of an MLP, which is not in its params."""
    dim, heads, vocabulary = params["dim"], params["n_heads"], params["vocab_size"]
    groups, size = params.get("n_kv_heads", heads), params.get("head_dim", dim // heads)
    hidden, moe = params.get("hidden_dim", inner), params.get("moe")
    found: dict[str, tuple[int, ...]] = {"tok_embeddings": (vocabulary, dim), "norm": (dim,)}
    found |= {} if params.get("tied_embeddings") else {"output": (vocabulary, dim)}
    for layer in range(params["n_layers"]):
        at = f"layers.{layer}"
        found |= {f"{at}.attention_norm": (dim,), f"{at}.ffn_norm": (dim,)}
        if latent := params.get("kv_lora_rank"):
            rank, plain, turned = params["q_lora_rank"], params["qk_nope_head_dim"], params["qk_rope_head_dim"]
            value = params["v_head_dim"]
            found |= {
                f"{at}.attention.wq_a": (rank, dim),
                f"{at}.attention.q_a_norm": (rank,),
                f"{at}.attention.wq_b": (heads * (plain + turned), rank),
                f"{at}.attention.wkv_a_with_mqa": (latent + turned, dim),
                f"{at}.attention.kv_a_norm": (latent,),
                f"{at}.attention.wkv_b": (heads * (plain + value), latent),
                f"{at}.attention.wo": (dim, heads * value),
            }
        else:
            found |= {f"{at}.attention.wq": (heads * size, dim), f"{at}.attention.wo": (dim, heads * size)}
            found |= {f"{at}.attention.w{each}": (groups * size, dim) for each in "kv"}
        if moe and "expert_hidden_dim" in moe and layer >= moe["first_k_dense_replace"]:
            found |= {f"{at}.gate": (moe["num_experts"], dim)}
            for place in ("shared_experts", *(f"experts.{each}" for each in range(moe["num_experts"]))):
                found |= _mlp(f"{at}.{place}", moe["expert_hidden_dim"], dim)
        elif moe and "expert_hidden_dim" not in moe:
            found |= {f"{at}.feed_forward.gate": (moe["num_experts"], dim)}
            for each in range(moe["num_experts"]):
                found |= _mlp(f"{at}.feed_forward.experts.{each}", hidden, dim)
        else:
            found |= _mlp(f"{at}.feed_forward", hidden, dim)
    if vision := params.get("vision_encoder"):
        wide, deep, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
        found |= {"vision_encoder.ln_pre": (wide,), "pre_mm_projector_norm": (wide,)}
        found |= {"vision_encoder.patch_conv": (wide, vision["num_channels"], patch, patch)}
        found |= {"patch_merger.merging_layer": (wide, wide * vision["spatial_merge_size"] ** 2)}
        found |= {"vision_language_adapter.w_in": (dim, wide), "vision_language_adapter.w_out": (dim, dim)}
        for layer in range(vision["num_hidden_layers"]):
            at = f"vision_encoder.transformer.layers.{layer}"
            found |= {f"{at}.attention_norm": (wide,), f"{at}.ffn_norm": (wide,)}
            found |= {f"{at}.attention.w{each}": (wide, wide) for each in "qkvo"} | _mlp(
                f"{at}.feed_forward", deep, wide
            )
    return found


def tensors(params: dict[str, Any], inner: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """A random model."""
    torch.manual_seed(0)
    made = {f"{name}.weight": torch.randn(shape) / 4 for name, shape in shapes(params, inner).items()}
    return {name: (1 + value if value.dim() == 1 else value).to(dtype) for name, value in made.items()}


def save_mistral(directory: Path, params: dict[str, Any], made: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Save a model as Mistral publishes it. Returns its tensors."""
    found = tensors(params) if made is None else made
    directory.mkdir(parents=True)
    save_file(found, directory / "consolidated.safetensors")
    (directory / "params.json").write_text(json.dumps(params))
    (directory / "tekken.json").write_text("{}")
    return found


def parts_of(name: str, tensor: Tensor, count: int, *, embedding_by_columns: bool) -> tuple[Tensor, ...]:
    """What each of so many ranks has of a tensor (llama/model.py: ColumnParallelLinear has rows of the weight,
    RowParallelLinear columns)."""
    if tensor.dim() == 1:
        return (tensor,) * count
    beside = name.endswith(("wo.weight", "w2.weight")) or (name.startswith("tok_") and embedding_by_columns)
    return tuple(part.clone() for part in tensor.chunk(count, 1 if beside else 0))


FP8 = {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}
YARN = {"factor": 16.0, "original_max_position_embeddings": 16384, "beta": 32.0, "alpha": 1.0}
LLAMAS_MLP = 224
"""What llama/model.py makes of META's sizes: two thirds of 256, 1.3 times, rounded up to 32."""


def save_meta(
    directory: Path, params: dict[str, Any], inner: int, count: int = 1, *, embedding_by_columns: bool = False
) -> dict[str, Tensor]:
    """Save a model as Meta publishes it, in so many parts. Returns its whole tensors."""
    found = tensors(params, inner)
    directory.mkdir(parents=True)
    parts = {
        name: parts_of(name, each, count, embedding_by_columns=embedding_by_columns) for name, each in found.items()
    }
    for rank in range(count):
        torch.save({name: part[rank] for name, part in parts.items()}, directory / f"consolidated.{rank:02}.pth")
    (directory / "params.json").write_text(json.dumps(params))
    return found


def saying(**params: Any) -> Callable[[Path], None]:
    """Change what params.json says."""

    def change(directory: Path) -> None:
        said = json.loads((directory / "params.json").read_text())
        (directory / "params.json").write_text(json.dumps(said | params))

    return change


def logits(params: dict[str, Any], made: dict[str, Tensor], ids: Tensor) -> Tensor:
    """What a model of Llama's kind computes for tokens `[n]`, FP32 `[n, vocabulary]`."""
    of = {name.removesuffix(".weight"): value.float() for name, value in made.items()}
    heads, eps, count = params["n_heads"], params["norm_eps"], len(ids)
    groups, size = params.get("n_kv_heads", heads), params.get("head_dim", params["dim"] // heads)
    frequencies = params.get("rope_theta", 10000.0) ** -(torch.arange(0, size, 2).float() / size)
    angles = torch.outer(torch.arange(count).float(), frequencies)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    windows = params.get("sliding_window", params.get("_sliding_window"))
    pattern = windows if isinstance(windows, list) else [windows]
    hidden = of["tok_embeddings"][ids]

    def norm(values: Tensor, name: str) -> Tensor:
        return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps) * of[name]

    def turned(values: Tensor) -> Tensor:
        pairs = torch.view_as_complex(values.reshape(*values.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(-2)

    def mlp(values: Tensor, place: str) -> Tensor:
        return (F.silu(values @ of[f"{place}.w1"].T) * (values @ of[f"{place}.w3"].T)) @ of[f"{place}.w2"].T

    for layer in range(params["n_layers"]):
        at, ahead = f"layers.{layer}", torch.arange(count)[:, None] - torch.arange(count)
        window = pattern[layer % len(pattern)]
        seen = (ahead >= 0) & (ahead < int(window or count))
        values = norm(hidden, f"{at}.attention_norm")
        queries, keys, of_values = (
            (values @ of[f"{at}.attention.w{each}"].T).view(count, -1, size) for each in ("q", "k", "v")
        )
        queries, keys = turned(queries), turned(keys).repeat_interleave(heads // groups, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / size**0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, of_values.repeat_interleave(heads // groups, 1))
        hidden = hidden + mixed.reshape(count, -1) @ of[f"{at}.attention.wo"].T
        values = norm(hidden, f"{at}.ffn_norm")
        if moe := params.get("moe"):
            chosen, experts = (values @ of[f"{at}.feed_forward.gate"].T).topk(moe["num_experts_per_tok"])
            shares, out = chosen.softmax(-1), torch.zeros_like(hidden)
            for token in range(count):
                for share, expert in zip(shares[token], experts[token], strict=True):
                    out[token] += share * mlp(values[token], f"{at}.feed_forward.experts.{int(expert)}")
        else:
            out = mlp(values, f"{at}.feed_forward")
        hidden = hidden + out
    return norm(hidden, "norm") @ of["tok_embeddings" if params.get("tied_embeddings") else "output"].T
