"""Megatron's stored tensors as logical ones: layers and experts unstacked, gate and up joined, names made uniform.

A tensor that no rule here knows keeps its key, so that a plan can refuse it: nothing is dropped.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from precisionctl.checkpoints.chunks import Box
from precisionctl.checkpoints.megatron.bridge_text import as_in_plans
from precisionctl.checkpoints.megatron.keys import PARAMETER_STATE, as_in_torch_dist, leading, unstack
from precisionctl.checkpoints.megatron.norm_names import is_indexed, te_names
from precisionctl.checkpoints.torch_files import dcp_metadata
from precisionctl.checkpoints.torch_files.dcp_tensors import (
    LogicalTensor,
    TensorPart,
    check_whole,
    flat_boxes,
    slices,
)
from precisionctl.errors import DamagedCheckpoint
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import (
    CONV_PARTS,
    EMBEDDING,
    GATED_QKV_PARTS,
    IN_PROJ_PARTS,
    KDA_PARTS,
    MIXER_CONV_PARTS,
    MIXER_PARTS,
    STATE,
    TensorSpec,
    state_name,
)

OPTIMIZER = "optimizer."
"""Prefix of everything of an optimizer."""
MASTER = state_name("param", "")
"""Prefix of FP32 master weights."""
_PLAIN_MASTER = state_name("fp32_param", "")
"""What Megatron's plain optimizer calls them; `param` is the distributed optimizer's word."""

_MOST_SLICES = 1 << 22
"""A bound on the tensors that a few bytes of `.metadata` can ask for. DeepSeek-V3 with its optimizer, 8 parts of each
of 58 x 256 experts' linears, has 10^6."""


def logical_tensors(
    stored: Mapping[str, dcp_metadata.DcpTensor], where: Path, described: Callable[[], ModelShape | None] = lambda: None
) -> dict[str, LogicalTensor]:
    """Every tensor by its logical name; the optimizer's are `optimizer.state.<kind>.<parameter>`. `where` is the
    checkpoint, for errors, and `described` the model of config.json, if there is one.

    Raises as `as_in_plans`, and DamagedCheckpoint where the pieces of a tensor do not cover it exactly once, and where
    two tensors have one name, or are on the same bytes.
    """
    prefix = model_prefix(stored)
    _check_count(stored, prefix, where)

    found: dict[str, LogicalTensor] = {}
    twice = {  # as `with_plain_masters` makes them
        key
        for key, tensor in stored.items()
        if key.startswith(_PLAIN_MASTER) and stored.get(MASTER + key.removeprefix(_PLAIN_MASTER)) == tensor
    }
    once = {key: tensor for key, tensor in stored.items() if key not in twice}

    for key, tensor in once.items():
        plain_key = plain(key, prefix)
        state = PARAMETER_STATE.fullmatch(plain_key)
        parameter = stored.get(prefix + state[2], stored.get(_outer(prefix) + state[2])) if state else None
        logical = _of_flat_shards(plain_key, tensor, parameter.shape) if parameter else []
        if not logical:  # itself, or one for each layer, each expert, or both
            depth = leading(plain_key)
            fits = depth <= len(tensor.shape)
            parts = slices(plain_key, tensor, depth if fits else 0, where)
            logical = [(unstack(plain_key, at) if fits else plain_key, one) for at, one in parts]
        for name, one in logical:
            if name in found:
                raise DamagedCheckpoint(f"{name} is there twice", where=where)
            found[name] = one

    found = as_in_plans(_joined(found), described, where)
    renamed = te_names(found, is_indexed(found))
    clash = [new for old, new in renamed.items() if new in found]
    if clash:
        raise DamagedCheckpoint(f"{clash[0]} is there twice", where=where)
    found = _by_parameter({renamed.get(name, name): one for name, one in found.items()})

    for name, one in found.items():
        check_whole(name, one, where)
    dcp_metadata.check_apart(((key, piece.span) for key, one in once.items() for piece in one.pieces), where)
    return found


def with_plain_masters(stored: Mapping[str, dcp_metadata.DcpTensor]) -> dict[str, dcp_metadata.DcpTensor]:
    """Stored tensors with each master a second time, as the plain optimizer calls it: two keys of the same bytes, so
    that either of Megatron's optimizers finds its own."""
    masters = (key for key in stored if key.startswith(MASTER))
    return {**stored, **{_PLAIN_MASTER + key.removeprefix(MASTER): stored[key] for key in masters}}


def model_prefix(keys: Mapping[str, object]) -> str:
    """The prefix of all names of the text model, found at the word embedding: `module.` or `model.` in NeMo's
    checkpoints, `model.module.` in fsdp_dtensor, empty in others; behind it, in Megatron-Bridge's wrappers,
    `language_model.`, which may be within `thinker.` or `llava_model.`"""
    found = (key.removesuffix(EMBEDDING) for key in keys if key.endswith(EMBEDDING) and not of_optimizer(key))
    prefix = min(found, key=len, default="")
    return prefix if not prefix or prefix.endswith(".") else ""


_BESIDE_TOWERS = "language_model."
"""What a text model's names begin with in Megatron-Bridge's wrappers, behind what all names begin with."""


def is_beside_towers(prefix: str) -> bool:
    """Whether the text model with this prefix is part of a wrapper of Megatron-Bridge's."""
    return prefix.endswith(_BESIDE_TOWERS)


def _outer(prefix: str) -> str:
    """The prefix of towers, beside a text model with this one."""
    return prefix.removesuffix(_BESIDE_TOWERS)


def without_prefix(prefix: str, name: str) -> str:
    """A stored name without what all names begin with, or what those of towers do, beside a text model with this
    `prefix`; as torch_dist has it, whatever modules are called."""
    return as_in_torch_dist(name.removeprefix(prefix if name.startswith(prefix) else _outer(prefix)))


_CHAINED = re.compile(r"chained_\d+\.")
_FSDP_STATE = re.compile(r"optimizer\.state\.(.+)\.(exp_avg|exp_avg_sq|momentum_buffer|param)")


def of_optimizer(key: str) -> bool:
    """Whether a key or a logical name belongs to an optimizer."""
    return _CHAINED.sub("", key, count=1).startswith(OPTIMIZER)


def plain(key: str, prefix: str) -> str:
    """A key without the prefixes that containers add: the model's, and `chained_1.` of several optimizers (dense and
    experts). FP32 master weights become kind `param`, which plain optimizers call `fp32_param`."""
    if not of_optimizer(key):
        return without_prefix(prefix, key)
    match = PARAMETER_STATE.fullmatch(_CHAINED.sub("", key, count=1))
    if match:
        kind, name = match[1], match[2]
    elif match := _FSDP_STATE.fullmatch(key):
        kind, name = match[2], match[1]
    else:
        return key
    kind = "param" if kind == "fp32_param" else kind
    name = without_prefix(prefix, name)
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return state_name(kind, name)


def _check_count(stored: Mapping[str, dcp_metadata.DcpTensor], prefix: str, where: Path) -> None:
    """Raise DamagedCheckpoint if the stored tensors have too many slices and parts to create them all."""
    count = 0
    for key, tensor in stored.items():
        depth = leading(plain(key, prefix))
        for sizes in (tensor.shape, *(piece.sizes for piece in tensor.pieces)):
            count += math.prod(sizes[:depth])
    if count > _MOST_SLICES:
        raise DamagedCheckpoint(f"it would be {count} tensors and parts of tensors", where=where)


def _of_flat_shards(
    key: str, stored: dcp_metadata.DcpTensor, shape: tuple[int, ...]
) -> list[tuple[str, LogicalTensor]]:
    """The logical tensors in a tensor of the distributed optimizer, as it stored them up to megatron-core 0.14
    (`fully_sharded_model_space`), for a parameter stored in this `shape`. Its dimensions are those of layers and
    experts, the number of shards of each of the parameter's dimensions, and the elements of a shard, of which ranks
    have pieces. Empty for any other layout.
    """
    depth = leading(key)
    if len(stored.shape) != len(shape) + 1 or 0 in stored.shape:
        return []
    counts, sizes, cuts, elements = stored.shape[:depth], shape[depth:], stored.shape[depth:-1], stored.shape[-1]
    if not sizes or shape[:depth] != counts or math.prod(cuts[2:]) != 1:
        return []
    shards = [size // cut for size, cut in zip(sizes, cuts, strict=True)]
    rows, columns = shards[0], math.prod(shards[1:])
    if elements != rows * columns or math.prod(sizes) != math.prod(cuts) * elements:
        return []
    found: dict[tuple[int, ...], list[TensorPart]] = {at: [] for at in itertools.product(*map(range, counts))}
    for piece in stored.pieces:
        *places, begin = piece.offsets
        if math.prod(piece.sizes[:-1]) != 1:
            return []
        row, column = (*places[depth:], 0)[:2]
        shard = Box(row * rows, rows, column * columns, columns)
        boxes = flat_boxes([shard], begin, begin + piece.sizes[-1])
        found[tuple(places[:depth])] += [TensorPart(box, piece, start) for box, start in boxes]
    spec = TensorSpec(sizes, stored.dtype)
    return [(unstack(key, at) if depth else key, LogicalTensor(spec, tuple(parts))) for at, parts in found.items()]


def _by_parameter(found: Mapping[str, LogicalTensor]) -> dict[str, LogicalTensor]:
    """Rename the optimizer's tensors that do not have their parameter's shape to `optimizer.flat.…`, so that no plan
    uses them."""
    named = {}
    for name, one in found.items():
        state = PARAMETER_STATE.fullmatch(name)
        parameter = found.get(state[2]) if state else None
        other = state and parameter and parameter.spec.shape != one.spec.shape
        named[f"optimizer.flat.{name.removeprefix(STATE)}" if other else name] = one
    return named


_APART = (
    (re.compile(r"(.+\.linear_fc1\.(?:weight|bias)\d*)_w"), ("_w", "_v")),  # gate and up
    *(
        (re.compile(r"(.+\.in_proj\.weight)\.query"), tuple(f".{part}" for part in parts))
        for parts in (IN_PROJ_PARTS, KDA_PARTS, CONV_PARTS)
    ),
    (re.compile(r"(.+\.linear_qkv\.weight)\._qkv"), tuple(f".{part}" for part in GATED_QKV_PARTS)),
    (re.compile(r"(.+\.conv1d\.weight)\.query"), tuple(f".{part}" for part in CONV_PARTS)),
    (re.compile(r"(.+\.in_proj\.weight)\.z"), tuple(f".{part}" for part in MIXER_PARTS)),
    (re.compile(r"(.+\.conv1d\.(?:weight|bias))\.x"), tuple(f".{part}" for part in MIXER_CONV_PARTS)),
)
"""Tensors whose parts Megatron stores apart: the name of the first part, and what is behind the name of each."""


def _joined(found: Mapping[str, LogicalTensor]) -> dict[str, LogicalTensor]:
    """Join the parts of a tensor, where all are there, one above the other."""
    joined = dict(found)
    for first in found:
        for pattern, ends in _APART:
            match = pattern.fullmatch(first)
            parts = [found[match[1] + end] for end in ends if match[1] + end in found] if match else []
            # of one kind are tensors that can stand one above the other
            kinds = {(part.spec.dtype, part.spec.shape[1:], bool(part.spec.shape)) for part in parts}
            if not match or match[1] in joined or len(parts) < len(ends) or len(kinds) != 1:
                continue
            above = [0, *itertools.accumulate(part.spec.rows for part in parts)]
            pieces = tuple(
                replace(piece, box=replace(piece.box, row=piece.box.row + rows))
                for rows, part in zip(above, parts, strict=False)
                for piece in part.parts
            )
            spec = replace(parts[0].spec, shape=(above[-1], *parts[0].spec.shape[1:]))
            joined[match[1]] = LogicalTensor(spec, pieces)
            for end in ends:
                del joined[match[1] + end]
    return joined
