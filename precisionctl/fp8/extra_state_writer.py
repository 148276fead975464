"""Write Transformer Engine's `_extra_state`, opcode by opcode: `pickle.dumps` would need TE's classes and would put
memory addresses into the bytes. Equal state gives equal bytes.

Version 2 is what TE 2.x writes. Version 1 is the pickle that TE 1.14 wrote, with the two extra tables that 1.0 to 1.5
require. Every TE from 0.6 to 1.14 reads it, more than any other form of 1.x.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Literal

from precisionctl.errors import PrecisionError
from precisionctl.fp8 import grouped
from precisionctl.fp8.extra_state import ATTENTION, FORMATS, SOFTMAX
from precisionctl.fp8.grouped import ColumnOrder, Columns, Directions
from precisionctl.fp8.state import ATTENTION_BACKWARD, ATTENTION_FORWARD, DelayedScaling, Fp8State, RoleState
from precisionctl.fp8.te_pickle import LEGACY_MAGIC, LEGACY_VERSION, RECIPES
from precisionctl.torch_when_used import torch
from precisionctl.untrusted.pickle_writer import Global, PersistentId, PickledObject, dumps

if TYPE_CHECKING:
    from torch import Tensor

TeVersion = Literal[1, 2]

ORDER: dict[TeVersion, ColumnOrder] = {1: "role", 2: "gemm"}
"""The order in which a grouped linear's columns are written: that of TE 1.9 to 2.2, and that of 2.3 and later."""


def has_payload(state: Fp8State) -> bool:
    """Whether TE has a payload for this state. It has none for the roles of a KV cache."""
    return state.of_gemm or not state.roles.keys().isdisjoint(ATTENTION_FORWARD + ATTENTION_BACKWARD)


def encode_payload(state: Fp8State, recipe: DelayedScaling, te: TeVersion = 2) -> bytes:
    """The bytes of the `_extra_state` of a GEMM, of attention, or, for a state of `[experts]`, of a grouped linear.
    `pickle.loads` makes TE's own objects of them where TE is installed.

    Raises PrecisionError for a state whose histories do not have the recipe's length.
    """
    for role, part in state.roles.items():
        if part.amax_history.shape != (*part.scale.shape, recipe.amax_history_len):
            raise PrecisionError(
                f"{role} has an amax history of shape {list(part.amax_history.shape)}",
                do=f"A TE payload of this recipe takes [{recipe.amax_history_len}].",
            )
    gemms = state.roles["weight"].scale.numel() if state.of_gemm else 3
    return encode_columns(columns_of(state, recipe, te), gemms, recipe, te)


def columns_of(state: Fp8State, recipe: DelayedScaling, te: TeVersion) -> Directions:
    """A state as TE's columns, forward and backward. Columns that attention's state does not have are fresh."""
    if state.of_gemm:
        return grouped.in_columns(state, ORDER[te])
    kept = state.roles.keys() & {*ATTENTION_FORWARD, *ATTENTION_BACKWARD}
    fresh = RoleState.fresh(recipe.amax_history_len)
    found = []
    for roles in SOFTMAX if kept <= {"s", "d_p"} else ATTENTION:
        parts = [state.roles.get(role, fresh) if role else fresh for role in roles]
        found.append(Columns(torch.stack([p.scale for p in parts]), torch.stack([p.amax_history for p in parts], 1)))
    return found[0], found[1]


def encode_columns(directions: Directions, gemms: int, recipe: DelayedScaling, te: TeVersion) -> bytes:
    """The bytes of an `_extra_state` with these columns, of `gemms` GEMMs."""
    payload: dict[str, object] = {"recipe": _recipe_object(recipe)} if te == 2 else {}
    for direction, columns in zip(("fwd", "bwd"), directions, strict=True):
        payload[f"scale_{direction}"] = _tensor_object(columns.scale)
        if te == 1:
            payload[f"scale_inv_{direction}"] = _tensor_object(1 / columns.scale)
        payload[f"amax_history_{direction}"] = _tensor_object(columns.history)
    forward, backward = FORMATS[recipe.fp8_format]
    payload["extra_fp8_variables"] = {
        "fp8_checkpoint": True,
        "num_gemms": gemms,
        "fp8_max_fwd": forward,
        "fp8_max_bwd": backward,
    }
    if te == 1:
        payload |= {"global_fp8_buffer": {}, "global_fp8_state": {}}
    return dumps(payload)


def _recipe_object(recipe: DelayedScaling) -> PickledObject:
    largest = PickledObject(Global(RECIPES, "_FormatHelper"), FORMATS[recipe.fp8_format], new=True)
    fields = {
        "margin": recipe.margin,
        "fp8_format": PickledObject(Global(RECIPES, "Format"), (largest,)),
        "amax_history_len": recipe.amax_history_len,
        "amax_compute_algo": recipe.amax_compute_algo,
        "scaling_factor_compute_algo": None,
        "reduce_amax": recipe.reduce_amax,
        "fp8_dpa": recipe.fp8_dpa,
        "fp8_mha": recipe.fp8_mha,
        "backward_override": None,
    }
    return PickledObject(Global(RECIPES, "DelayedScaling"), (), new=True, fields=fields)


def _tensor_object(values: Tensor) -> PickledObject:
    values = values.detach().float().cpu().contiguous()
    # `torch.save` of an FP32 storage in the legacy format (torch/serialization.py, _legacy_save), which is how
    # storages pickle, with the key "0" where PyTorch puts an address
    sizes = {"short": 2, "int": 4, "long": 4}
    system = {"protocol_version": LEGACY_VERSION, "little_endian": True, "type_sizes": sizes}
    reference = ("storage", Global("torch", "FloatStorage"), "0", "cpu", values.numel(), None)
    pickles = (LEGACY_VERSION, system, PersistentId(reference), ["0"])
    numbers = struct.pack("<q", values.numel()) + values.view(torch.uint8).numpy().tobytes()
    saved = LEGACY_MAGIC + b"".join(dumps(value, protocol=2) for value in pickles) + numbers
    storage = PickledObject(Global("torch.storage", "_load_from_bytes"), (saved,))
    hooks = PickledObject(Global("collections", "OrderedDict"), ())
    arguments = (storage, 0, tuple(values.shape), values.stride(), False, hooks)
    return PickledObject(Global("torch._utils", "_rebuild_tensor_v2"), arguments)
