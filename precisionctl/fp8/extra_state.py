"""Read Transformer Engine's `_extra_state` of every version from 0.1 on, without executing the pickle.

TE keeps the FP8 state of a module as `scale_*` `[columns]` and `amax_history_*` `[history, columns]`, forward and
backward, pickled in ways that changed over time (docs/payloads.md has the table). Reading has two steps: any form
becomes a Payload, and a Payload the state of a GEMM, a group of GEMMs or attention. `extra_state_writer.py` is the
inverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from precisionctl.errors import DamagedCheckpoint, NotUnderstood, RecipeError
from precisionctl.fp8 import grouped
from precisionctl.fp8.grouped import ColumnOrder, Columns, Directions
from precisionctl.fp8.state import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    BACKWARD,
    FORWARD,
    DelayedScaling,
    Fp8State,
    Role,
    RoleState,
)
from precisionctl.fp8.te_pickle import Delayed, PickledTensor, load, storage, tensor
from precisionctl.torch_when_used import torch
from precisionctl.untrusted.safe_json import mapping_or_empty

FORMATS = {"HYBRID": (448, 57344), "E4M3": (448, 448)}
"""By `fp8_format`, the largest code value forward and backward; TE stores the format as these."""

ATTENTION: tuple[tuple[Role | None, ...], tuple[Role | None, ...]] = (
    (None, None, "qkv", "o", None, None, None, None, "s"),
    ("d_qkv", None, None, "d_o", None, "d_p"),
)
"""Attention's columns, forward and backward (cpp_extensions/fused_attn.py, META_*); the others are never used."""

SOFTMAX: tuple[tuple[Role | None, ...], tuple[Role | None, ...]] = ((None, None, "s"), (None, "d_p"))
"""Attention's columns where only the softmax has delayed scaling and the rest current scaling: the last third of
ATTENTION's (dot_product_attention.py, set_meta_tensor)."""

_MOST_GEMMS = 1 << 12
_TENSORS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
_MODES = {"fwd": ("input", "param", "forward"), "bwd": ("grad_output", "backward")}
"""Keys under which fused operations (te.ops) keep their tensors: by kind of tensor in TE 1.13 and 1.14, later by
direction."""


class ExpertSlice(NamedTuple):
    """A payload that Megatron cut out of a grouped linear's: the number of its expert, the number of experts, and the
    columns of all experts."""

    expert: int
    experts: int
    whole: Directions


@dataclass(frozen=True)
class Payload:
    """What an `_extra_state` holds, in one form for all versions of TE.

    `directions` has three columns forward and two backward for each of `gemms` GEMMs; columns that TE did not store are
    fresh. `assumed` is True for a payload without a recipe, whose margin, algorithm and so on are TE's defaults.
    `order` is that of a grouped linear's columns, if the payload tells which versions of TE can have written it. `cut`
    is set where Megatron cut this payload out of a grouped linear's: its tensors are views, and a view is pickled with
    its whole storage.
    """

    recipe: DelayedScaling
    directions: Directions
    gemms: int
    assumed: bool
    order: ColumnOrder | None
    cut: ExpertSlice | None

    def state(self, where: object) -> Fp8State:
        """The state of one GEMM, or of attention, with scales `[]`. `where` names the payload in errors.

        Raises NotUnderstood for anything else, DamagedCheckpoint for a wrong number of columns or impossible numbers.
        """
        if self.gemms not in (1, 3):
            raise NotUnderstood(f"FP8 state of {self.gemms} GEMMs", where=where)
        if self.gemms == 3:
            state = Fp8State(_attention(self.directions, where))
        else:
            grouped.check_columns(self.directions, len(FORWARD), len(BACKWARD), where)
            parts = [part for columns in self.directions for part in _each(columns)]
            state = Fp8State(dict(zip(FORWARD + BACKWARD, parts, strict=True)))
        state.check(self.recipe, where)
        return state

    def group(self, order: ColumnOrder, where: object) -> Fp8State:
        """The state of a grouped linear, with scales `[gemms]`, from columns in this order. Raises DamagedCheckpoint
        for a wrong number of columns or impossible numbers."""
        state = grouped.by_gemm(self.directions, self.gemms, order, where)
        state.check(self.recipe, where)
        return state


def decode_payload(data: bytes, where: object, *, of_group: bool = False) -> tuple[DelayedScaling, Fp8State] | None:
    """The recipe and state in the bytes of an `_extra_state`; None if it holds none. With `of_group` it is a grouped
    linear's, and scales are `[gemms]`. `where` names the payload in errors.

    Raises NotUnderstood for a valid payload of anything but a GEMM, a group of GEMMs or attention, or whose columns are
    in an unknown order; otherwise as `read_payload`.
    """
    payload = read_payload(data, where)
    if payload is None:
        return None
    if not of_group:
        return payload.recipe, payload.state(where)
    order = payload.order or grouped.order_of(payload.directions, payload.gemms, where)
    if order is None:
        raise NotUnderstood("FP8 state of a grouped linear, with its columns in an unknown order", where=where)
    return payload.recipe, payload.group(order, where)


def read_payload(data: bytes, where: object) -> Payload | None:
    """Decode the bytes of an `_extra_state`; None if they hold no state: no bytes, a pickled None, or a recipe without
    state. `where` names the payload in errors.

    Raises NotUnderstood for a valid payload of an unknown form, UnsafePickle for a pickle that asks for anything but
    TE's classes, DamagedCheckpoint for one that contradicts itself.
    """
    found = load(data, where) if data else None
    if isinstance(found, list) and len(found) == 10:  # TE 0.1 and 0.2
        found = dict(zip(_TENSORS, found[:4], strict=True))
    if found is None:
        return None
    if not isinstance(found, dict):
        raise NotUnderstood(f"FP8 state that is a {type(found).__name__}", where=where)
    modes = [found.get(mode) for names in _MODES.values() for mode in names]
    parts = [part for part in (found, *modes) if isinstance(part, dict)]  # fused operations have one for each mode
    if not any(key in part for part in parts for key in _TENSORS):
        return None
    recipe = next((part["recipe"] for part in parts if "recipe" in part), None)
    if recipe is not None and not isinstance(recipe, Delayed):
        raise NotUnderstood("FP8 state of another recipe than delayed scaling", where=where)
    directions = _columns(found, "fwd", where), _columns(found, "bwd", where)
    extra = mapping_or_empty(found.get("extra_fp8_variables"))
    gemms = extra.get("num_gemms", None if extra else len(directions[0].scale) // 2)
    if type(gemms) is not int or not 1 <= gemms <= _MOST_GEMMS:
        raise NotUnderstood("FP8 state of an unknown number of GEMMs", where=where)
    cut = _cut(found, directions, where) if gemms == 1 else None
    known, order = _recipe(recipe, extra, directions[0], where), _order(recipe)
    if [len(columns.scale) for columns in directions] == [2 * gemms, gemms]:
        # TE up to 0.5, and fused operations, keep no columns of output and grad_input
        directions = _padded(directions[0], gemms), _padded(directions[1], gemms)
    return Payload(known, directions, gemms, assumed=recipe is None, order=order, cut=cut)


def _columns(found: Mapping[str, Any], direction: str, where: object) -> Columns:
    """All columns of one direction. Those of fused operations, which are stored by mode, are put side by side."""
    modes = [found.get(mode) for mode in _MODES[direction]]
    keys = (f"scale_{direction}", f"amax_history_{direction}")
    parts = [found, *modes] if any(key in found for key in keys) else modes
    sources = [part for part in parts if isinstance(part, dict) and any(key in part for key in keys)]
    if not sources:
        raise NotUnderstood(f"FP8 state without {keys[0]}", where=where)
    read = [Columns(*(tensor(part.get(key), f"{where}, {key}") for key in keys)) for part in sources]
    for scale, history in read:
        if scale.dim() != 1 or history.dim() != 2 or history.shape[1] != scale.shape[0] or not len(history):
            shapes = f"{list(scale.shape)} and {list(history.shape)}"
            raise DamagedCheckpoint(f"scale_{direction} and its history have the shapes {shapes}", where=where)
        if scale.dtype != torch.float32 or history.dtype != torch.float32:
            raise DamagedCheckpoint(f"FP8 state in {scale.dtype} and {history.dtype}, not FP32", where=where)
    if len({history.shape[0] for _, history in read}) > 1:
        raise DamagedCheckpoint("amax histories of several lengths", where=where)
    return Columns(torch.cat([scale for scale, _ in read]), torch.cat([history for _, history in read], 1))


def _padded(columns: Columns, gemms: int) -> Columns:
    """Add a fresh column (scale 1, history 0) to each GEMM's columns."""
    scale = columns.scale.view(gemms, -1)
    history = columns.history.view(len(columns.history), gemms, -1)
    scale = torch.cat([scale, scale.new_ones(gemms, 1)], 1)
    history = torch.cat([history, history.new_zeros(len(history), gemms, 1)], 2)
    return Columns(scale.flatten(), history.flatten(1))


def _recipe(recipe: Delayed | None, extra: Mapping[str, Any], forward: Columns, where: object) -> DelayedScaling:
    """Our DelayedScaling from a pickled TE recipe. Of a payload without one it is known what the largest code values
    tell, the format, and the history's length."""
    if recipe is None:
        largest = (extra.get("fp8_max_fwd"), extra.get("fp8_max_bwd"))
        known = next((name for name, pair in FORMATS.items() if pair == largest), "HYBRID")
        fields: dict[str, Any] = {"fp8_format": known, "amax_history_len": len(forward.history)}
    else:
        fields = {name: recipe.fields[name] for name in DelayedScaling.__dataclass_fields__ if name in recipe.fields}
        if "fp8_format" in fields:
            limits = getattr(fields["fp8_format"], "value", None)
            fields["fp8_format"] = next((name for name, pair in FORMATS.items() if pair == limits), None)
    try:
        return DelayedScaling(**fields)
    except RecipeError as error:
        raise DamagedCheckpoint(f"an FP8 recipe that makes no sense: {error.what}", where=where) from error


def _order(recipe: Delayed | None) -> ColumnOrder | None:
    """The order of columns in the TE that wrote this, where the recipe, or that there is none, tells its version."""
    # DelayedScaling had `interval` up to TE 2.1 and has `backward_override` since 2.15; the order changed in 2.3
    if recipe is None or "interval" in recipe.fields:
        return "role"
    return "gemm" if "backward_override" in recipe.fields else None


def _cut(found: Mapping[str, Any], directions: Directions, where: object) -> ExpertSlice | None:
    """The grouped linear that this payload of one GEMM was cut from, or None.

    Megatron takes column `expert` of every `experts` columns, so the pickled scale is a view with that offset and
    stride, and its storage still has the columns of all experts.
    """
    match found.get("scale_fwd"):
        case PickledTensor(offset=int(expert), stride=(int(experts),)) if 1 < experts <= _MOST_GEMMS:
            pass
        case _:
            return None
    if not all(isinstance(found.get(key), PickledTensor) for key in _TENSORS):
        return None
    whole = []
    for direction, columns in zip(("fwd", "bwd"), directions, strict=True):
        scale, history = (storage(found[f"{kind}_{direction}"], where) for kind in ("scale", "amax_history"))
        rows, wide = len(columns.history), len(columns.scale) * experts
        if scale.numel() != wide or history.numel() != rows * wide:
            return None
        whole.append(Columns(scale, history.view(rows, wide)))
    same = all(torch.equal(one.scale, of.scale[expert::experts]) for one, of in zip(directions, whole, strict=True))
    return ExpertSlice(expert, experts, (whole[0], whole[1])) if same else None


def _attention(directions: Directions, where: object) -> dict[Role, RoleState]:
    """The roles of attention, by column. Raises NotUnderstood where a column that attention does not use has state."""
    layout = SOFTMAX if len(directions[0].scale) == len(SOFTMAX[0]) else ATTENTION
    grouped.check_columns(directions, len(layout[0]), len(layout[1]), where)
    roles: dict[Role, RoleState] = {}
    for names, columns in zip(layout, directions, strict=True):
        for role, part in zip(names, _each(columns), strict=True):
            if role is not None:
                roles[role] = part
            elif part.recorded:
                raise NotUnderstood("FP8 state of attention with unknown columns", where=where)
    return {role: roles[role] for role in ATTENTION_FORWARD + ATTENTION_BACKWARD if role in roles}


def _each(columns: Columns) -> list[RoleState]:
    return [RoleState(scale.clone(), columns.history[:, i].clone()) for i, scale in enumerate(columns.scale)]
