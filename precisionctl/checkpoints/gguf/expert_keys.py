"""What the metadata of a GGUF file say of experts."""

from collections.abc import Mapping
from typing import Any

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import (
    GgufEntry,
    Said,
    SameAs,
    always,
    in_all_layers,
    integer,
    number,
    refused,
    value_of,
)
from precisionctl.model.model_shape import ModelShape

EXPERT_COUNTS: tuple[GgufEntry, ...] = (
    integer("moe.num_experts", "expert_count"),
    integer("moe.topk", "expert_used_count"),
)
EXPERT_SIZE = integer("moe.ffn_hidden_size", "expert_feed_forward_length")
SHARED_EXPERT_SIZE = integer("moe.shared_ffn_hidden_size", "expert_shared_feed_forward_length")
WEIGHTS_SCALE = number("moe.topk_scaling_factor", "expert_weights_scale", 1.0)

IN_ALL_LAYERS: Mapping[str, Any] = {"moe.layer_freq": in_all_layers(True)}
AS_LARGE_AS_MLP: Mapping[str, Any] = {"moe.ffn_hidden_size": SameAs("ffn_hidden_size")}


def _read_shared(file: Described) -> Fields:
    size = file.count("expert_shared_count") * file.count("expert_feed_forward_length")
    return {"moe.shared_ffn_hidden_size": size or None}


def _write_shared(model: ModelShape) -> Said:
    shared = value_of(model, "moe.shared_ffn_hidden_size")
    if not shared:
        raise refused(model, "without shared experts")
    return {"expert_shared_count": shared // value_of(model, "moe.ffn_hidden_size")}


SHARED_COUNT = GgufEntry(("moe.shared_ffn_hidden_size",), ("expert_shared_count",), _read_shared, _write_shared)
"""So many, each as large as a routed one."""


ONE_SHARED = always("expert_shared_count", 1)


def _read_dense(file: Described) -> Fields:
    dense = file.count("leading_dense_block_count", 0)
    return {"moe.layer_freq": tuple(layer >= dense for layer in range(file.decoder_layers()))}


def _write_dense(model: ModelShape) -> Said:
    experts = value_of(model, "moe.layer_freq")
    if list(experts) != sorted(experts):
        raise refused(model, "with an MLP in layers behind those with experts")
    return {"leading_dense_block_count": experts.count(False)}


LEADING_DENSE = GgufEntry(("moe.layer_freq",), ("leading_dense_block_count",), _read_dense, _write_dense)


def with_router(file: Described) -> tuple[bool, ...]:
    """For each decoder layer whether it has a router, and so experts."""
    return tuple(file.has(f"blk.{layer}.ffn_gate_inp.weight") for layer in range(file.decoder_layers()))


ROUTED_LAYERS = GgufEntry(("moe.layer_freq",), (), lambda file: {"moe.layer_freq": with_router(file)})
"""Of a family whose files do not say which layers have experts."""

_SCORES = "expert_gating_func"
_FUNCTIONS = {"softmax": 1, "sigmoid": 2}
"""llama.cpp's numbers of the functions that score experts."""


def is_scored_by(function: str, file: Described) -> bool:
    """Whether a file says that this function scores its experts."""
    return bool(file.count(_SCORES, 0) == _FUNCTIONS[function])


def scored_by(function: str) -> GgufEntry:
    """The one function that scores experts in all models of a family, which a file may say."""

    def read(file: Described) -> Fields:
        file.expect(_SCORES, _FUNCTIONS[function])
        return {"moe.score_function": function}

    return GgufEntry(("moe.score_function",), (_SCORES,), read, lambda model: {_SCORES: _FUNCTIONS[function]})


NORMALISED = GgufEntry(
    ("moe.pre_softmax",),
    ("expert_weights_norm",),
    lambda file: {"moe.pre_softmax": file.said("expert_weights_norm") is not True},
    lambda model: {} if value_of(model, "moe.pre_softmax") else {"expert_weights_norm": True},
)
"""Whether the weights of chosen experts add up to one."""

_GROUPS = ("moe.num_groups", "moe.group_topk", "moe.group_scores")


def groups(scores: int) -> GgufEntry:
    """Groups of experts, each of which is worth so many of its scores in the family."""

    def read(file: Described) -> Fields:
        number, best = file.count("expert_group_count", 1), file.count("expert_group_used_count", 1)
        return dict(zip(_GROUPS, (number, best, scores) if number > 1 else (None,) * 3, strict=True))

    def write(model: ModelShape) -> Said:
        number, best = (value_of(model, name) or 1 for name in _GROUPS[:2])
        if number == best:  # all of them, at which llama.cpp aborts
            number = best = 1
        return {"expert_group_count": number, "expert_group_used_count": best}

    return GgufEntry(_GROUPS[:2], ("expert_group_count", "expert_group_used_count"), read, write)


TWO_SCORES: Mapping[str, Any] = {"moe.group_scores": lambda fields: 2 if fields["moe.num_groups"] else None}
"""What a group is worth to llama.cpp."""

DEEPSEEK_CHOICE = (*EXPERT_COUNTS, groups(2), scored_by("sigmoid"))
"""How DeepSeek-V3 chooses experts, and many since."""
