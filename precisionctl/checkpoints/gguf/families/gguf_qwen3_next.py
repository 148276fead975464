"""Qwen3-Next and Qwen3.5, in most of whose layers a gated delta net is in the place of attention.

Sources: llama.cpp's src/models/qwen3next.cpp, qwen35.cpp and qwen35moe.cpp, and conversion/qwen.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.delta_net import DELTA_NET, DELTA_NET_INPUT, DELTA_NET_OUTPUT, VALUE_HEADS
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.mrope_keys import Images
from precisionctl.checkpoints.tensor_changes import DECAY, KERNEL, PLUS_ONE, Both
from precisionctl.model.model_shape import ModelShape

_SPARSE = [*rows.ROUTER, *rows.EXPERTS, *rows.SHARED_EXPERT, *rows.SHARED_EXPERT_GATE]


def _with_delta_nets(block: list[rows.GgufRow], delta_net: list[rows.GgufRow]) -> list[rows.GgufRow]:
    """Layers with attention and layers with a gated delta net; `block` are the rows of a layer's MLP, which the layer
    of multi-token prediction has too."""
    attention = [*rows.in_layers({**rows.NORMS_BY_PLACE, **rows.QK_NORMS}, PLUS_ONE), *rows.ATTENTION, *block]
    return [
        *rows.outside_layers(PLUS_ONE),
        *attention,
        *delta_net,
        *rows.in_layers({"linear_attn.norm": "ssm_norm"}),
        *rows.in_prediction(attention),
        rows.GgufRow("mtp.fc.weight", ("blk.{mtp_layer}.nextn.eh_proj.weight",)),
        rows.GgufRow("mtp.pre_fc_norm_embedding.weight", ("blk.{mtp_layer}.nextn.enorm.weight",), PLUS_ONE),
        rows.GgufRow("mtp.pre_fc_norm_hidden.weight", ("blk.{mtp_layer}.nextn.hnorm.weight",), PLUS_ONE),
        rows.GgufRow("mtp.norm.weight", ("blk.{mtp_layer}.nextn.shared_head_norm.weight",), PLUS_ONE),
    ]


_DELTA_NET_OF_QWEN3_NEXT = [
    rows.replaced_by("linear_attn.in_proj_qkvz", ("attn_qkv", "attn_gate"), DELTA_NET),
    *rows.in_layers({"linear_attn.in_proj_ba": "ssm_ba", "linear_attn.out_proj": "ssm_out"}),
    *rows.in_layers({"linear_attn.conv1d": "ssm_conv1d"}, KERNEL),
    rows.in_layer("linear_attn.dt_bias", "ssm_dt.bias"),
    rows.in_layer("linear_attn.A_log", "ssm_a", DECAY),
]
_DELTA_NET_OF_QWEN3_5 = [
    *rows.in_layers({"linear_attn.in_proj_qkv": "attn_qkv"}, DELTA_NET_INPUT),
    *rows.in_layers(
        {
            "linear_attn.in_proj_z": "attn_gate",
            "linear_attn.in_proj_b": "ssm_beta",
            "linear_attn.in_proj_a": "ssm_alpha",
        },
        VALUE_HEADS,
    ),
    *rows.in_layers({"linear_attn.out_proj": "ssm_out"}, DELTA_NET_OUTPUT),
    *rows.in_layers({"linear_attn.conv1d": "ssm_conv1d"}, Both(KERNEL, DELTA_NET_INPUT)),
    rows.in_layer("linear_attn.dt_bias", "ssm_dt.bias", VALUE_HEADS),
    rows.in_layer("linear_attn.A_log", "ssm_a", Both(DECAY, VALUE_HEADS)),
]


def _read_value_size(file: Described) -> Fields:
    return {"gdn.value_head_dim": file.share("ssm.inner_size", "ssm.time_step_rank")}


def _read_recurrent(file: Described) -> Fields:
    layers, number = file.decoder_layers(), file.count("full_attention_interval", 4, least=1)
    usual = [(layer + 1) % number != 0 for layer in range(layers)]
    return {"gdn.layers": tuple(file.flags("attention.recurrent_layers") or usual)}


def _write_recurrent(model: ModelShape) -> keys.Said:
    recurrent = [*keys.value_of(model, "gdn.layers"), *[False] * model.mtp_num_layers]
    return {"attention.recurrent_layers": recurrent, "full_attention_interval": 4}


_DELTA_NET = (
    keys.integer("gdn.conv_kernel_dim", "ssm.conv_kernel"),
    keys.integer("gdn.key_head_dim", "ssm.state_size"),
    keys.integer("gdn.num_key_heads", "ssm.group_count"),
    keys.integer("gdn.num_value_heads", "ssm.time_step_rank"),
    keys.GgufEntry(
        ("gdn.value_head_dim",),
        ("ssm.inner_size",),
        _read_value_size,
        lambda model: {"ssm.inner_size": keys.value_of(model, "gdn.value_size")},
    ),
    keys.GgufEntry(
        ("gdn.layers",),
        ("attention.recurrent_layers", "full_attention_interval"),
        _read_recurrent,
        _write_recurrent,
    ),
)

_SCALED = (*rows.SCALED, *rows.SCALED_EXPERTS, *rows.SCALED_SHARED_EXPERT, "nextn.eh_proj")
_IMAGES = Images((11, 11, 10))
_ROPE = (_IMAGES.sections, rope_keys.ROPE)
_COMPUTED: Mapping[str, Any] = {
    **dict.fromkeys(("zero_centered_gamma", "hf_zero_centered_gamma", "qk_layernorm"), True),
    "attention_output_gate": True,
    "gdn.value_head_dim": lambda fields: fields["gdn.key_head_dim"],
}
_QWEN3_5 = GgufFamily(
    "qwen35",
    rows=_with_delta_nets(rows.MLP, _DELTA_NET_OF_QWEN3_5),
    keys=base_keys(layers=keys.LAYERS_AND_PREDICTION, rope=_ROPE),
    more=(keys.PREDICTION_LAYERS, *_DELTA_NET, rope_keys.TURNED),
    computed=_COMPUTED,
    scaled=(*_SCALED, "attn_qkv", "attn_gate", "ssm_out", "ssm_alpha", "ssm_beta"),
    images=_IMAGES,
)

FAMILIES = {
    "qwen3_next": GgufFamily(
        "qwen3next",
        rows=_with_delta_nets(_SPARSE, _DELTA_NET_OF_QWEN3_NEXT),
        keys=base_keys(*expert_keys.EXPERT_COUNTS, layers=keys.LAYERS_AND_PREDICTION),
        more=(
            expert_keys.EXPERT_SIZE,
            expert_keys.SHARED_EXPERT_SIZE,
            keys.PREDICTION_LAYERS,
            *_DELTA_NET,
            rope_keys.TURNED,
        ),
        computed={**expert_keys.IN_ALL_LAYERS, **_COMPUTED, "moe.shared_expert_gate": True},
        scaled=_SCALED,
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": replace(
        _QWEN3_5,
        architecture="qwen35moe",
        rows=_with_delta_nets(_SPARSE, _DELTA_NET_OF_QWEN3_5),
        keys=base_keys(*expert_keys.EXPERT_COUNTS, layers=keys.LAYERS_AND_PREDICTION, rope=_ROPE, mlp=()),
        more=(expert_keys.EXPERT_SIZE, expert_keys.SHARED_EXPERT_SIZE, *_QWEN3_5.more),
        computed={
            **expert_keys.IN_ALL_LAYERS,
            **_COMPUTED,
            "moe.shared_expert_gate": True,
            "ffn_hidden_size": lambda fields: fields["moe.ffn_hidden_size"],
        },
    ),
}
