"""Qwen3-Next and Qwen3.5, in most of whose layers a gated delta net is in the place of attention.

Sources: llama.cpp's src/models/qwen3next.cpp, qwen35.cpp and qwen35moe.cpp, and conversion/qwen.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from precisionctl.architectures.config_keys import Fields
from precisionctl.architectures.rearrangements import Movable, concatenated, cut_into, rows_of_groups
from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.mrope_keys import Images
from precisionctl.checkpoints.tensor_changes import DECAY, KERNEL, PLUS_ONE, Both, OfColumns, RowMove
from precisionctl.errors import DamagedCheckpoint
from precisionctl.model.model_shape import ModelShape


class _ByKind(RowMove):
    """The input projection of a gated delta net: in GGUF all queries, then all keys, then all values, and a tensor of
    output gates; in Hugging Face one that goes by key head (Qwen3-Next)."""

    def to_parts(self, values: Movable, model: ModelShape) -> tuple[Movable, ...]:
        heads, sizes = self._by_head(model)
        if len(values) != heads * sum(sizes):
            raise DamagedCheckpoint(f"{len(values)} rows are no {heads} heads of {sum(sizes)}")
        by_head = values.reshape(heads, sum(sizes), *values.shape[1:])
        query, key, value, gate = map(rows_of_groups, cut_into(by_head, sizes, 1))
        return concatenated([query, key, value]), gate

    def to_hf(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        heads, sizes = self._by_head(model)
        kinds = cut_into(concatenated(parts), [heads * size for size in sizes])
        by_head = [kind.reshape(heads, -1, *kind.shape[1:]) for kind in kinds]
        return rows_of_groups(concatenated(by_head, 1))

    def _by_head(self, model: ModelShape) -> tuple[int, list[int]]:
        """The number of key heads, and for each the rows of queries, keys, values and gates."""
        assert model.gdn
        heads = model.gdn.num_key_heads
        return heads, [size // heads for size in model.gdn.in_proj_parts[:4]]


@dataclass(frozen=True)
class _ValueHeadsInTurns(RowMove):
    """Heads of values of a gated delta net, and what belongs to one: in GGUF the first of each key head, then the
    second of each; in Hugging Face all of a key head, then those of the next (Qwen3.5). With `behind_keys` the rows of
    queries and keys stand before."""

    behind_keys: bool = False

    def to_parts(self, values: Movable, model: ModelShape) -> tuple[Movable, ...]:
        return (self._exchanged(values, model, by_key_head=False),)

    def to_hf(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        return self._exchanged(parts[0], model, by_key_head=True)

    def _exchanged(self, rows_of_all: Movable, model: ModelShape, *, by_key_head: bool) -> Movable:
        assert model.gdn
        heads, key_heads = model.gdn.num_value_heads, model.gdn.num_key_heads
        before = 2 * model.gdn.key_size if self.behind_keys else 0
        count = len(rows_of_all) - before
        if count <= 0 or count % heads:
            raise DamagedCheckpoint(f"{count} rows are no {heads} heads of values")
        others, values = cut_into(rows_of_all, [before, count])
        order = (heads // key_heads, key_heads) if by_key_head else (key_heads, heads // key_heads)
        moved = values.reshape(*order, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
        return concatenated([others, moved])


_DELTA_NET_INPUT = _ByKind()
_VALUE_HEADS, _VALUE_HEADS_BEHIND_KEYS = _ValueHeadsInTurns(), _ValueHeadsInTurns(behind_keys=True)

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
    rows.replaced_by("linear_attn.in_proj_qkvz", ("attn_qkv", "attn_gate"), _DELTA_NET_INPUT),
    *rows.in_layers({"linear_attn.in_proj_ba": "ssm_ba", "linear_attn.out_proj": "ssm_out"}),
    *rows.in_layers({"linear_attn.conv1d": "ssm_conv1d"}, KERNEL),
    rows.in_layer("linear_attn.dt_bias", "ssm_dt.bias"),
    rows.in_layer("linear_attn.A_log", "ssm_a", DECAY),
]
_DELTA_NET_OF_QWEN3_5 = [
    *rows.in_layers({"linear_attn.in_proj_qkv": "attn_qkv"}, _VALUE_HEADS_BEHIND_KEYS),
    *rows.in_layers(
        {
            "linear_attn.in_proj_z": "attn_gate",
            "linear_attn.in_proj_b": "ssm_beta",
            "linear_attn.in_proj_a": "ssm_alpha",
        },
        _VALUE_HEADS,
    ),
    *rows.in_layers({"linear_attn.out_proj": "ssm_out"}, OfColumns(_VALUE_HEADS)),
    *rows.in_layers({"linear_attn.conv1d": "ssm_conv1d"}, Both(KERNEL, _VALUE_HEADS_BEHIND_KEYS)),
    rows.in_layer("linear_attn.dt_bias", "ssm_dt.bias", _VALUE_HEADS),
    rows.in_layer("linear_attn.A_log", "ssm_a", Both(DECAY, _VALUE_HEADS)),
]


def _read_recurrent(file: Described) -> Fields:
    layers, number = file.decoder_layers(), file.count("full_attention_interval", 4, least=1)
    usual = [(layer + 1) % number != 0 for layer in range(layers)]
    return {"gdn.layers": tuple(file.flags("attention.recurrent_layers") or usual)}


_DELTA_NET = (
    keys.integer("gdn.conv_kernel_dim", "ssm.conv_kernel"),
    keys.integer("gdn.key_head_dim", "ssm.state_size"),
    keys.integer("gdn.num_key_heads", "ssm.group_count"),
    keys.integer("gdn.num_value_heads", "ssm.time_step_rank"),
    keys.GgufEntry(
        ("gdn.value_head_dim",),
        ("ssm.inner_size",),
        lambda file: {"gdn.value_head_dim": file.share("ssm.inner_size", "ssm.time_step_rank")},
        lambda model: {"ssm.inner_size": keys.value_of(model, "gdn.value_size")},
    ),
    keys.GgufEntry(
        ("gdn.layers",),
        ("attention.recurrent_layers", "full_attention_interval"),
        _read_recurrent,
        lambda model: {
            "attention.recurrent_layers": [*keys.value_of(model, "gdn.layers"), *[False] * model.mtp_num_layers],
            "full_attention_interval": 4,
        },
    ),
)

_SCALED = (*rows.SCALED, *rows.SCALED_EXPERTS, *rows.SCALED_SHARED_EXPERT, "nextn.eh_proj")
_IMAGES = Images((11, 11, 10))
_ROPE = (_IMAGES.sections, rope_keys.ROPE)
_COMPUTED: Mapping[str, Any] = {
    **dict.fromkeys(("zero_centered_gamma", "hf_zero_centered_gamma", "qk_layernorm"), True),
    "attention_output_gate": True,
    "gdn.value_head_dim": keys.SameAs("gdn.key_head_dim"),
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
            "ffn_hidden_size": keys.SameAs("moe.ffn_hidden_size"),
        },
    ),
}
