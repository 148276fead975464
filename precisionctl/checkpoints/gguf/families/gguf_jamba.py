"""Jamba.

Sources: llama.cpp's src/models/jamba.cpp and mamba-base.cpp, and conversion/jamba.py.
"""

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.families.gguf_mamba import COMPUTED, MIXER, mixer
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.model.model_shape import ModelShape


def _read_layers(file: Described) -> Fields:
    """Without a router in any layer, a file says that there is one expert."""
    groups = file.counts(keys.HEADS_KV)
    chooses = expert_keys.with_router(file)
    pattern = "".join(
        ("*" if heads else "M") + ("E" if router else "-") for heads, router in zip(groups, chooses, strict=True)
    )
    ffn, number, used = (file.count(key) for key in ("feed_forward_length", "expert_count", "expert_used_count"))
    fields = {
        "num_layers": len(pattern),
        "mamba.pattern": pattern,
        "ffn_hidden_size": ffn,
        **keys.read_some_heads(file, groups),
    }
    if not any(chooses):
        return fields
    return fields | {
        "moe.num_experts": number,
        "moe.topk": used,
        "moe.ffn_hidden_size": ffn,
        "moe.layer_freq": tuple(kind == "E" for kind in pattern),
        "moe.pre_softmax": True,
    }


_LAYERS = keys.GgufEntry(
    (
        *("num_layers", "mamba.pattern", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
        *(f"moe.{field}" for field in ("num_experts", "topk", "ffn_hidden_size", "layer_freq", "pre_softmax")),
    ),
    (*keys.LAYERS.keys, *keys.MLP_SIZE.keys, *keys.HEADS.keys, "expert_count", "expert_used_count"),
    _read_layers,
    lambda model: {"block_count": len(_pattern(model)) // 2},
)
"""A layer of GGUF is two of Megatron's."""


def _pattern(model: ModelShape) -> str:
    return model.mamba.pattern if model.mamba else ""


_SIZES = keys.write_only(
    lambda model: {
        "feed_forward_length": model.ffn_hidden_size,
        "attention.head_count": model.num_attention_heads,
        keys.HEADS_KV: [model.num_query_groups if kind == "*" else 0 for kind in _pattern(model)[::2]],
    }
)
_EXPERTS = keys.write_only(
    lambda model: {
        "expert_count": model.moe.num_experts if model.moe else 1,
        "expert_used_count": model.moe.topk if model.moe else 1,
    }
)
"""What _LAYERS reads."""


_NORMS = {"mamba.dt_layernorm": "ssm_dt_norm", "mamba.b_layernorm": "ssm_b_norm", "mamba.c_layernorm": "ssm_c_norm"}

FAMILIES = {
    "jamba": GgufFamily(
        "jamba",
        rows=[
            rows.GgufRow("model.embed_tokens.weight", ("token_embd.weight",)),
            rows.GgufRow("model.final_layernorm.weight", ("output_norm.weight",)),
            rows.GgufRow("lm_head.weight", ("output.weight",)),
            *rows.in_layers({"input_layernorm": "attn_norm", "pre_ff_layernorm": "ffn_norm"}),
            *mixer("mamba"),
            *rows.in_layers(_NORMS),
            *rows.ATTENTION,
            *rows.in_layers({f"feed_forward.{hf}": gguf for hf, gguf in rows.GATED.items()}),
            *rows.in_layers({"feed_forward.router": "ffn_gate_inp"}),
            *rows.experts("feed_forward.experts"),
        ],
        keys=(_LAYERS, keys.CONTEXT, keys.WIDTH, _SIZES, *MIXER, keys.EPSILON, _EXPERTS),
        reads=(rope_keys.ROPE,),  # which no layer has
        turned=None,
        computed={
            "kv_channels": keys.hidden_by_heads,
            "rope_layers": keys.in_all_layers(False),
            **COMPUTED,
            "mamba.bcdt_layernorm": True,
        },
    ),
}
