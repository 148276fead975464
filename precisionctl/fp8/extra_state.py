"""Transformer Engine's `_extra_state`: read without running what the pickle says, written byte for byte alike.

TE 2.x keeps the FP8 state of a module as a pickle in a uint8 tensor (pytorch/module/base.py,
get_extra_state): a recipe object, `scale_*` `[columns]` and `amax_history_*` `[history, columns]`, with the
columns of FORWARD and BACKWARD for one GEMM. Reading unpickles it into the inert records below and takes
them apart only afterwards; writing assembles the opcodes, because `pickle.dumps` would need TE's classes
and would put memory addresses into the bytes.
"""

import io
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from precisionctl import safe_pickle
from precisionctl.errors import DamagedCheckpoint, NotUnderstood, PrecisionError, RecipeError
from precisionctl.fp8.opcodes import Global, Made, Persistent, dumps
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

_RECIPES = "transformer_engine.common.recipe"
_FORMATS = {"HYBRID": (448, 57344), "E4M3": (448, 448)}
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch/serialization.py, MAGIC_NUMBER, pickled
_LEGACY_VERSION = 1001
_ARCHIVE = b"PK\3\4"  # of torch.save, with which TE 1.x wrote
_MOST_GEMMS = 1 << 12
_ATTENTION: tuple[tuple[Role | None, ...], tuple[Role | None, ...]] = (
    (None, None, "qkv", "o", None, None, None, None, "s"),
    ("d_qkv", None, None, "d_o", None, "d_p"),
)
"""Attention's columns, forward and backward (cpp_extensions/fused_attn.py, META_*); the others are never used."""
_SOFTMAX: tuple[tuple[Role | None, ...], tuple[Role | None, ...]] = ((None, None, "s"), (None, "d_p"))
"""The last third of them: all that is delayed where the rest is in current scaling (attention.py, set_meta_tensor)."""
_TENSORS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")


class _Record:
    """Stands in for a TE class that pickles as its plain `__dict__`."""

    fields: Mapping[str, Any] = {}

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.fields = state


class _Delayed(_Record):
    """Stands in for DelayedScaling and Megatron's subclass of it."""


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class _Format(NamedTuple):
    value: _FormatHelper


class _Storage(NamedTuple):
    """Stands in for `torch.storage._load_from_bytes`, which is an unrestricted `torch.load`."""

    saved: bytes


class _StoredTensor(NamedTuple):
    """Stands in for `torch._utils._rebuild_tensor_v2`."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    hooks: Mapping[str, object]


_ALLOWED: safe_pickle.Allowed = {
    (_RECIPES, "DelayedScaling"): _Delayed,
    ("megatron.core.extensions.transformer_engine", "TEDelayedScaling"): _Delayed,
    (_RECIPES, "Float8CurrentScaling"): _Record,
    (_RECIPES, "Float8BlockScaling"): _Record,
    (_RECIPES, "MXFP8BlockScaling"): _Record,
    (_RECIPES, "NVFP4BlockScaling"): _Record,
    (_RECIPES, "MMParams"): _Record,
    (_RECIPES, "QParams"): _Record,
    (_RECIPES, "Format"): _Format,
    (_RECIPES, "_FormatHelper"): _FormatHelper,
    ("torch._utils", "_rebuild_tensor_v2"): _StoredTensor,
    ("torch.storage", "_load_from_bytes"): _Storage,
    ("collections", "OrderedDict"): safe_pickle.ordered_dict,
}


def decode_payload(data: bytes, where: object, *, grouped: bool = False) -> tuple[DelayedScaling, Fp8State] | None:
    """Recipe and state in the bytes of a TE 2.x `_extra_state`; None where there is none: empty, a pickled
    None, or a recipe that keeps no state. `where` names the payload in errors. `grouped`: it is a GroupedLinear's,
    whose columns are each role's GEMMs one after the other, and the state is of `[GEMMs]`.

    Raises NotUnderstood for a sound payload of something else than such a GEMM (attention, fused operations,
    TE 1.x), UnsafePickle for one that asks for more than TE's classes, DamagedCheckpoint for one
    that contradicts itself.
    """
    if data.startswith(_ARCHIVE):
        raise NotUnderstood("FP8 state in the form of TE 1.x", where=where)
    payload = safe_pickle.loads(data, _ALLOWED, where) if data else None
    if payload is None:
        return None
    if not isinstance(payload, dict):
        raise NotUnderstood(f"FP8 state that is a {type(payload).__name__}", where=where)
    if not any(key in part for part in _parts(payload) for key in _TENSORS):
        return None
    if not isinstance(payload.get("recipe"), _Delayed):
        raise NotUnderstood("FP8 state without a delayed-scaling recipe", where=where)
    extra = payload.get("extra_fp8_variables")
    gemms = extra.get("num_gemms") if isinstance(extra, dict) else None
    if type(gemms) is not int or not 1 <= gemms <= _MOST_GEMMS:
        raise NotUnderstood("FP8 state of an unknown number of GEMMs", where=where)
    tensors = {key: _tensor(payload.get(key), f"{where}, {key}") for key in _TENSORS}
    if gemms == 3 and not grouped:
        roles = _attention(tensors, where)
    elif gemms == 1 or grouped:
        number = gemms if grouped else None
        roles = {**_split(tensors, "fwd", FORWARD, number, where), **_split(tensors, "bwd", BACKWARD, number, where)}
    else:
        raise NotUnderstood("FP8 state of something else than one GEMM", where=where)
    recipe, state = _recipe(payload["recipe"].fields, where), Fp8State(roles)
    state.check(recipe, where)
    return recipe, state


def _attention(tensors: Mapping[str, Tensor], where: object) -> dict[Role, RoleState]:
    """Raises NotUnderstood where a column has numbers that attention does not use."""
    layout = _SOFTMAX if tensors["scale_fwd"].numel() == len(_SOFTMAX[0]) else _ATTENTION
    roles: dict[Role, RoleState] = {}
    for direction, columns in zip(("fwd", "bwd"), layout, strict=True):
        for role, part in zip(columns, _columns(tensors, direction, len(columns), where), strict=True):
            if role is not None:
                roles[role] = part
            elif part.recorded:
                raise NotUnderstood("FP8 state of attention with unknown columns", where=where)
    return {role: roles[role] for role in ATTENTION_FORWARD + ATTENTION_BACKWARD if role in roles}


def _parts(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """The payload and, for TE's fused operations, its forward and backward halves."""
    return [part for part in (payload, payload.get("forward"), payload.get("backward")) if isinstance(part, dict)]


def _recipe(fields: Mapping[str, Any], where: object) -> DelayedScaling:
    known = {name: fields[name] for name in DelayedScaling.__dataclass_fields__ if name in fields}
    if "fp8_format" in known:
        limits = getattr(known["fp8_format"], "value", None)
        known["fp8_format"] = next((name for name, pair in _FORMATS.items() if pair == limits), None)
    try:
        return DelayedScaling(**known)
    except RecipeError as error:
        raise DamagedCheckpoint(f"an FP8 recipe that makes no sense: {error.what}", where=where) from error


def _split(
    tensors: Mapping[str, Tensor], direction: str, roles: tuple[Role, ...], gemms: int | None, where: object
) -> dict[Role, RoleState]:
    """The columns of one direction, by role; of each, `gemms` in a group."""
    columns = _columns(tensors, direction, len(roles) * (gemms or 1), where)
    if gemms is None:
        return dict(zip(roles, columns, strict=True))
    groups = [columns[i * gemms : (i + 1) * gemms] for i in range(len(roles))]
    return {
        role: RoleState(torch.stack([p.scale for p in group]), torch.stack([p.amax_history for p in group]))
        for role, group in zip(roles, groups, strict=True)
    }


def _columns(tensors: Mapping[str, Tensor], direction: str, wanted: int, where: object) -> list[RoleState]:
    scale, history = tensors[f"scale_{direction}"], tensors[f"amax_history_{direction}"]
    if scale.dim() != 1 or history.dim() != 2 or history.shape[1] != scale.shape[0]:
        shapes = f"{list(scale.shape)} and {list(history.shape)}"
        raise DamagedCheckpoint(f"scale_{direction} and its history have the shapes {shapes}", where=where)
    if len(scale) != wanted:
        raise DamagedCheckpoint(f"FP8 state with {len(scale)} {direction} columns, not {wanted}", where=where)
    return [RoleState(scale[i].clone(), history[:, i].clone()) for i in range(wanted)]


def _tensor(stored: object, where: object) -> Tensor:
    """The tensor that a record describes, after checking that it lies within its storage."""
    if not isinstance(stored, _StoredTensor) or not isinstance(stored.storage, _Storage):
        raise DamagedCheckpoint("FP8 state lacks a tensor", where=where)
    values = _storage(stored.storage.saved, where)
    try:
        return safe_pickle.strided(values, stored.offset, stored.size, stored.stride)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"a tensor reaches beyond its storage: {error}", where=where) from error


def _storage(saved: object, where: object) -> Tensor:
    """All of a storage that was pickled with `torch.save`'s legacy format, as `[elements]`.

    Taken apart here, because torch.load makes whatever such a file asks it for.
    """
    if not isinstance(saved, bytes) or not saved.startswith(_LEGACY_MAGIC):
        raise DamagedCheckpoint("a tensor's storage is not one that PyTorch wrote", where=where)
    file = io.BytesIO(saved[len(_LEGACY_MAGIC) :])
    _version, _system, *reference = (
        safe_pickle.load(file, safe_pickle.STORAGES, f"{where}, its storage", safe_pickle.itself) for _ in range(4)
    )
    match reference:
        case [("storage", torch.dtype() as dtype, str(key), _, int(elements), None), [str(only)]] if key == only:
            count, numbers = file.read(8), file.read()
        case _:
            raise DamagedCheckpoint("a tensor's storage is not one that PyTorch wrote", where=where)
    if not 0 < int.from_bytes(count, "little") == elements == len(numbers) / dtype.itemsize:
        raise DamagedCheckpoint("a tensor's storage is shorter or longer than it says", where=where)
    return torch.frombuffer(bytearray(numbers), dtype=dtype)


def encode_payload(state: Fp8State, recipe: DelayedScaling) -> bytes:
    """The bytes of a TE 2.x `_extra_state` for a GEMM, or a grouped one for a state of `[experts]`: what
    `pickle.loads` turns into TE's own objects where TE is installed. Equal state gives equal bytes.

    Raises PrecisionError for a state that does not have the recipe's history length.
    """
    for role, part in state.roles.items():
        if part.amax_history.shape != (*part.scale.shape, recipe.amax_history_len):
            raise PrecisionError(
                f"{role} has an amax history of shape {list(part.amax_history.shape)}",
                do=f"A TE payload of this recipe takes [{recipe.amax_history_len}].",
            )
    payload: dict[str, object] = {"recipe": _recipe_object(recipe)}
    for direction, parts in zip(("fwd", "bwd"), _parts_in_order(state, recipe.amax_history_len), strict=True):
        histories = [part.amax_history.reshape(-1, recipe.amax_history_len).t() for part in parts]
        payload[f"scale_{direction}"] = _tensor_object(torch.cat([part.scale.reshape(-1) for part in parts]))
        payload[f"amax_history_{direction}"] = _tensor_object(torch.cat(histories, 1))
    forward, backward = _FORMATS[recipe.fp8_format]
    payload["extra_fp8_variables"] = {
        "fp8_checkpoint": True,
        "num_gemms": state.roles["weight"].scale.numel() if state.of_gemm else 3,
        "fp8_max_fwd": forward,
        "fp8_max_bwd": backward,
    }
    return dumps(payload)


def has_payload(state: Fp8State) -> bool:
    """Whether TE keeps any of it: of a cache's keys and values it keeps nothing."""
    return state.of_gemm or not state.roles.keys().isdisjoint(ATTENTION_FORWARD + ATTENTION_BACKWARD)


def _parts_in_order(state: Fp8State, history: int) -> tuple[list[RoleState], list[RoleState]]:
    """The columns forward and backward; what is not kept of attention is as TE starts it."""
    if state.of_gemm:
        return [state.roles[role] for role in FORWARD], [state.roles[role] for role in BACKWARD]
    kept = state.roles.keys() & {*ATTENTION_FORWARD, *ATTENTION_BACKWARD}
    layout = _SOFTMAX if kept <= {"s", "d_p"} else _ATTENTION
    fresh = RoleState.fresh(history)
    forward, backward = ([state.roles.get(role, fresh) if role else fresh for role in columns] for columns in layout)
    return forward, backward


def _recipe_object(recipe: DelayedScaling) -> Made:
    largest = Made(Global(_RECIPES, "_FormatHelper"), _FORMATS[recipe.fp8_format], new=True)
    fields = {
        "margin": recipe.margin,
        "fp8_format": Made(Global(_RECIPES, "Format"), (largest,)),
        "amax_history_len": recipe.amax_history_len,
        "amax_compute_algo": recipe.amax_compute_algo,
        "scaling_factor_compute_algo": None,
        "reduce_amax": recipe.reduce_amax,
        "fp8_dpa": recipe.fp8_dpa,
        "fp8_mha": recipe.fp8_mha,
        "backward_override": None,
    }
    return Made(Global(_RECIPES, "DelayedScaling"), (), new=True, fields=fields)


def _tensor_object(values: Tensor) -> Made:
    values = values.detach().float().cpu().contiguous()
    storage = Made(Global("torch.storage", "_load_from_bytes"), (_saved_storage(values),))
    hooks = Made(Global("collections", "OrderedDict"), ())
    arguments = (storage, 0, tuple(values.shape), values.stride(), False, hooks)
    return Made(Global("torch._utils", "_rebuild_tensor_v2"), arguments)


def _saved_storage(values: Tensor) -> bytes:
    """`torch.save` of an FP32 storage in the legacy format (torch/serialization.py, _legacy_save), which is how
    storages pickle, with the key "0" where PyTorch puts an address."""
    sizes = {"short": 2, "int": 4, "long": 4}
    system = {"protocol_version": _LEGACY_VERSION, "little_endian": True, "type_sizes": sizes}
    reference = ("storage", Global("torch", "FloatStorage"), "0", "cpu", values.numel(), None)
    pickles = (_LEGACY_VERSION, system, Persistent(reference), ["0"])
    numbers = struct.pack("<q", values.numel()) + values.view(torch.uint8).numpy().tobytes()
    return _LEGACY_MAGIC + b"".join(dumps(value, protocol=2) for value in pickles) + numbers
