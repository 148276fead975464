"""Llama and those whose graph is Llama's: Mistral, InternLM3, IQuest-Coder, Mixtral, SmolLM3, Ministral 3; and Llama 4.

Sources: llama.cpp's src/models/llama.cpp, smollm3.cpp, mistral3.cpp and llama4.cpp, and conversion/llama.py,
mistral3.py and llama4.py.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.model.model_shape import ModelShape

_LLAMA = GgufFamily(
    "llama",
    rows=[*rows.DECODER_IN_PAIRS, *rows.MLP],
    keys=base_keys(),
    more=(keys.VOCABULARY, rope_keys.TURNED, keys.ATTENTION_BIAS, keys.MLP_BIAS),
    reads=(keys.NO_EXPERTS,),
    ignored=keys.NO_WINDOW,
    scalings=rope_keys.AND_LLAMA3,
    scaled=rows.SCALED,
    recognises=lambda file: not file.count("expert_count", 0),
)
_AS_LLAMA = replace(_LLAMA, recognises=lambda file: False)
"""Those whose files say that they are Llamas, and are read as such."""

# Llama 4


def _read_step(file: Described) -> Fields:
    step = file.count("interleave_moe_layer_step", least=1)
    return {"moe.layer_freq": tuple((layer + 1) % step == 0 for layer in range(file.layers()))}


def _write_step(model: ModelShape) -> keys.Said:
    assert model.moe
    experts = model.moe.layer_freq
    step = experts.index(True) + 1 if True in experts else 0
    if not step or experts != tuple((layer + 1) % step == 0 for layer in range(len(experts))):
        raise keys.refused(model, "with experts in other layers than each of some number")
    return {"interleave_moe_layer_step": step}


_STEP = keys.GgufEntry(("moe.layer_freq",), ("interleave_moe_layer_step",), _read_step, _write_step)


FAMILIES = {
    "llama": _LLAMA,
    "mistral": _AS_LLAMA,
    "iquestcoder": _AS_LLAMA,
    "internlm3": replace(_AS_LLAMA, scalings={**rope_keys.AND_LLAMA3, **rope_keys.BEYOND_CONTEXT}),
    "mixtral": GgufFamily(
        "llama",
        rows=[*rows.DECODER_IN_PAIRS, *rows.EXPERTS_OF_MIXTRAL],
        keys=base_keys(*expert_keys.EXPERT_COUNTS, head_size=keys.UNUSUAL_HEAD_SIZE),
        more=(keys.VOCABULARY, rope_keys.TURNED),
        computed={**expert_keys.IN_ALL_LAYERS, **expert_keys.AS_LARGE_AS_MLP},
        ignored=keys.NO_WINDOW,
        recognises=lambda file: file.count("expert_count", 0) > 0,
        scaled=(*rows.SCALED, *rows.SCALED_EXPERTS),
    ),
    "ministral3": GgufFamily(
        "mistral3",
        rows=[*rows.DECODER_IN_PAIRS, *rows.MLP],
        keys=base_keys(),
        more=(keys.VOCABULARY, rope_keys.TURNED, rope_keys.WHOLE_MULTIPLIER, rope_keys.QUERY_SCALING),
        ignored=keys.NO_WINDOW,
        reads_betas=True,
        of_scaling=rope_keys.mscales(needed=False),
        scaled=rows.SCALED,
    ),
    "smollm3": GgufFamily(
        "smollm3",
        rows=[*rows.DECODER_IN_PAIRS, *rows.MLP],
        keys=base_keys(head_size=keys.UNUSUAL_HEAD_SIZE),
        more=(keys.VOCABULARY, rope_keys.TURNED),
        reads=(keys.ATTENTION_BIAS, keys.MLP_BIAS),
        computed={"rope_layers": keys.every(4)},
    ),
    "llama4_text": GgufFamily(
        "llama4",
        rows=[
            *rows.DECODER,
            *rows.in_layers({f"feed_forward.{hf}": gguf for hf, gguf in rows.GATED.items()}),
            *rows.shared_expert("feed_forward.shared_expert"),
            *rows.in_layers({"feed_forward.router": "ffn_gate_inp"}),
            *rows.experts("feed_forward.experts"),
        ],  # its experts are `[out, in]` in GGUF, and so under the names that their codes have, one by one
        keys=base_keys(*expert_keys.EXPERT_COUNTS),
        more=(keys.VOCABULARY, rope_keys.TURNED, _STEP, expert_keys.EXPERT_SIZE),
        computed={
            "rotary_interleaved": True,
            "rope_layers": keys.every(4),
            "attention_chunk_size": 8192,
            "window_layers": keys.every(4),
            "query_scaling_beta": 0.1,
            "query_scaling_floor": 8192,
            "qk_l2_norm": lambda fields: fields["moe.num_experts"] != 128,
            "moe.shared_ffn_hidden_size": keys.SameAs("moe.ffn_hidden_size"),
            "moe.score_function": "sigmoid",
            "moe.probs_on_input": True,
        },
        scalings=rope_keys.AND_LLAMA3,
        # between the frequencies that Llama 3's scaling divides and those that it leaves, the releases have none
        of_scaling=lambda scaling: (
            {"high_freq_factor": 1.0}
            if scaling.get("rope_type") == "llama3" and "high_freq_factor" not in scaling
            else {}
        ),
    ),
}
