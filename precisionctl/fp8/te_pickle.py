"""Unpickle Transformer Engine's extra state into inert records: no code of the pickle or of TE is executed.

Tensors stay records, too, until `tensor` has checked that they lie within their storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint
from precisionctl.torch_when_used import torch
from precisionctl.untrusted import safe_archive, safe_pickle

if TYPE_CHECKING:
    from torch import Tensor

RECIPES = "transformer_engine.common.recipe"
LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch/serialization.py, MAGIC_NUMBER, pickled
LEGACY_VERSION = 1001


class PickledFields:
    """Stands in for a TE class that pickles as its plain `__dict__`."""

    fields: Mapping[str, Any] = {}

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.fields = state


class Delayed(PickledFields):
    """Stands in for DelayedScaling and Megatron's subclass of it."""


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class _Format(NamedTuple):
    value: _FormatHelper


class _Saved(NamedTuple):
    """Stands in for `torch.storage._load_from_bytes`, which is an unrestricted `torch.load`."""

    data: bytes


class PickledTensor(NamedTuple):
    """Stands in for `torch._utils._rebuild_tensor_v2`: a view of a storage, which is a flat tensor in an archive."""

    storage: _Saved | Tensor
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    hooks: Mapping[str, object]


_ALLOWED: safe_pickle.Allowed = {
    (RECIPES, "DelayedScaling"): Delayed,
    ("megatron.core.extensions.transformer_engine", "TEDelayedScaling"): Delayed,
    ("megatron.core.transformer.custom_layers.transformer_engine", "TEDelayedScaling"): Delayed,
    (RECIPES, "Float8CurrentScaling"): PickledFields,
    (RECIPES, "Float8BlockScaling"): PickledFields,
    (RECIPES, "MXFP8BlockScaling"): PickledFields,
    (RECIPES, "NVFP4BlockScaling"): PickledFields,
    (RECIPES, "MMParams"): PickledFields,
    (RECIPES, "QParams"): PickledFields,
    (RECIPES, "Format"): _Format,
    (RECIPES, "_FormatHelper"): _FormatHelper,
    ("torch._utils", "_rebuild_tensor_v2"): PickledTensor,
    ("torch.storage", "_load_from_bytes"): _Saved,
    ("collections", "OrderedDict"): safe_pickle.ordered_dict,
}
_IN_ARCHIVE: safe_pickle.Allowed = {**_ALLOWED, **safe_pickle.STORAGES}


def load(data: bytes, where: object) -> Any:
    """Unpickle a payload: a bare pickle, or an archive of torch.save, which TE wrote from 0.12 to 1.13.

    Raises UnsafePickle for one that asks for anything but TE's classes, DamagedCheckpoint for one that cannot be read.
    """
    if data.startswith(safe_archive.MAGIC):
        return safe_archive.loads(data, _IN_ARCHIVE, where)
    return safe_pickle.loads(data, _ALLOWED, where)


def tensor(stored: object, where: object) -> Tensor:
    """The tensor that a record describes. Raises DamagedCheckpoint if `stored` is not the record of a tensor, or the
    tensor reaches beyond its storage."""
    if not isinstance(stored, PickledTensor):
        raise DamagedCheckpoint("FP8 state lacks a tensor", where=where)
    values = storage(stored, where)
    try:
        return safe_pickle.strided(values, stored.offset, stored.size, stored.stride)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"a tensor reaches beyond its storage: {error}", where=where) from error


def storage(stored: PickledTensor, where: object) -> Tensor:
    """All of a tensor's storage, as `[elements]`. Raises DamagedCheckpoint if it is not one that PyTorch wrote.

    In a bare pickle a storage is a file in torch.save's legacy format. It is parsed here, because torch.load would
    execute what such a file asks for.
    """
    if isinstance(stored.storage, torch.Tensor):
        return stored.storage
    saved = stored.storage.data if isinstance(stored.storage, _Saved) else None
    if not isinstance(saved, bytes) or not saved.startswith(LEGACY_MAGIC):
        raise DamagedCheckpoint("a tensor's storage is not one that PyTorch wrote", where=where)
    at, read = len(LEGACY_MAGIC), []
    for _ in range(4):
        value, at = safe_pickle.load_from(saved, at, safe_pickle.STORAGES, f"{where}, its storage", safe_pickle.itself)
        read.append(value)
    match read:
        case [
            _version,
            {"little_endian": True},
            ("storage", DType() as dtype, str(key), _device, int(elements), None),
            [str(only)],
        ] if key == only:
            count, numbers = saved[at : at + 8], saved[at + 8 :]
        case _:
            raise DamagedCheckpoint("a tensor's storage is not one that PyTorch wrote", where=where)
    if not 0 < int.from_bytes(count, "little") == elements == len(numbers) / dtype.itemsize:
        raise DamagedCheckpoint("a tensor's storage is shorter or longer than it says", where=where)
    return torch.frombuffer(bytearray(numbers), dtype=dtype.torch)
