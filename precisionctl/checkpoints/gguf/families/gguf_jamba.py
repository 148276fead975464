"""Jamba.

Sources: llama.cpp's src/models/jamba.cpp and mamba-base.cpp, and conversion/jamba.py.
"""

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.expert_keys import with_router
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import (
    CONTEXT,
    EPSILON,
    HEADS,
    HEADS_KV,
    LAYERS,
    MLP_SIZE,
    WIDTH,
    GgufKey,
    GgufRule,
    Said,
    hidden_by_heads,
    read_some_heads,
    refused,
    write_only,
)
from precisionctl.checkpoints.gguf.rope_keys import ROPE
from precisionctl.checkpoints.gguf.tensor_rows import ATTENTION, GATED, GgufRow, experts, in_layer, in_layers
from precisionctl.checkpoints.tensor_changes import DECAY, KERNEL
from precisionctl.model.model_shape import ModelShape


def _read_layers(file: Described) -> Fields:
    """Without a router in any layer, a file says that there is one expert."""
    groups = file.counts(HEADS_KV)
    chooses = with_router(file)
    pattern = "".join(
        ("*" if heads else "M") + ("E" if router else "-") for heads, router in zip(groups, chooses, strict=True)
    )
    ffn, number, used = (file.count(key) for key in ("feed_forward_length", "expert_count", "expert_used_count"))
    fields = {
        "num_layers": len(pattern),
        "mamba.pattern": pattern,
        "ffn_hidden_size": ffn,
        **read_some_heads(file, groups),
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


_LAYERS = GgufRule(
    (
        *("num_layers", "mamba.pattern", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
        *(f"moe.{field}" for field in ("num_experts", "topk", "ffn_hidden_size", "layer_freq", "pre_softmax")),
    ),
    (*LAYERS.keys, *MLP_SIZE.keys, *HEADS.keys, "expert_count", "expert_used_count"),
    _read_layers,
    lambda model: {"block_count": len(_pattern(model)) // 2},
)
"""A layer of GGUF is two of Megatron's."""


def _pattern(model: ModelShape) -> str:
    return model.mamba.pattern if model.mamba else ""


def _write_sizes(model: ModelShape) -> Said:
    groups = [model.num_query_groups if kind == "*" else 0 for kind in _pattern(model)[::2]]
    return {
        "feed_forward_length": model.ffn_hidden_size,
        "attention.head_count": model.num_attention_heads,
        HEADS_KV: groups,
    }


def _write_experts(model: ModelShape) -> Said:
    number, used = (model.moe.num_experts, model.moe.topk) if model.moe else (1, 1)
    return {"expert_count": number, "expert_used_count": used}


def _read_channels(file: Described) -> Fields:
    file.expect("ssm.conv_kernel", 4)
    return {"mamba.num_heads": file.count("ssm.inner_size", least=1)}


def _write_channels(model: ModelShape) -> Said:
    assert model.mamba
    if model.mamba.inner_size != 2 * model.hidden_size:
        raise refused(model, f"whose mixers have {model.mamba.inner_size} channels, but twice its hidden states'")
    return {"ssm.conv_kernel": model.mamba.conv_kernel_dim, "ssm.inner_size": model.mamba.inner_size}


_MIXER = {
    "mamba.in_proj": "ssm_in",
    "mamba.x_proj": "ssm_x",
    "mamba.dt_proj": "ssm_dt",
    "mamba.dt_layernorm": "ssm_dt_norm",
    "mamba.b_layernorm": "ssm_b_norm",
    "mamba.c_layernorm": "ssm_c_norm",
    "mamba.out_proj": "ssm_out",
}

FAMILIES = {
    "jamba": GgufFamily(
        "jamba",
        rows=[
            GgufRow("model.embed_tokens.weight", ("token_embd.weight",)),
            GgufRow("model.final_layernorm.weight", ("output_norm.weight",)),
            GgufRow("lm_head.weight", ("output.weight",)),
            *in_layers({"input_layernorm": "attn_norm", "pre_ff_layernorm": "ffn_norm"}),
            *in_layers(_MIXER),
            *in_layers({"mamba.conv1d": "ssm_conv1d"}, KERNEL),
            in_layer("mamba.conv1d.bias", "ssm_conv1d.bias"),
            in_layer("mamba.dt_proj.bias", "ssm_dt.bias"),
            in_layer("mamba.A_log", "ssm_a", DECAY),
            in_layer("mamba.D", "ssm_d"),
            *ATTENTION,
            *in_layers({f"feed_forward.{hf}": gguf for hf, gguf in GATED.items()}),
            *in_layers({"feed_forward.router": "ffn_gate_inp"}),
            *experts("feed_forward.experts", {hf: f"{gguf}_exps" for hf, gguf in GATED.items()}),
        ],
        keys=(
            *(_LAYERS, CONTEXT, WIDTH, write_only(_write_sizes)),
            GgufRule(("mamba.num_heads",), ("ssm.conv_kernel", "ssm.inner_size"), _read_channels, _write_channels),
            *(GgufKey("mamba.state_dim", "ssm.state_size"), GgufKey("mamba.dt_rank", "ssm.time_step_rank"), EPSILON),
            write_only(_write_experts),
        ),
        reads=(ROPE,),  # which no layer has
        computed={
            "kv_channels": hidden_by_heads,
            "rope_layers": lambda fields: (False,) * fields["num_layers"],
            "mamba.head_dim": 1,
            "mamba.num_groups": 1,
            "mamba.gated_norm": False,
        },
    ),
}
"""By the `model_type` of the text model."""
