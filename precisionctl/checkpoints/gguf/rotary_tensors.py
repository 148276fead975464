"""Tensors of a GGUF file that are no weights: by these llama.cpp divides frequencies of rotary embeddings. They say how
config.json scales them, or are compared with what it says.

Source: llama.cpp's converter (generate_extra_tensors of conversion/llama.py, llama4.py, phi.py and gemma.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

import numpy as np

from precisionctl.architectures.config_keys import Fields
from precisionctl.architectures.rope import LLAMA3
from precisionctl.checkpoints.base import WITH_REFERENCE
from precisionctl.checkpoints.chunks import read_bytes
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.metadata import Described, shortest
from precisionctl.checkpoints.gguf.rope_keys import BEYOND_CONTEXT, OF_LLAMA3
from precisionctl.checkpoints.gguf.tensors import GgufPart
from precisionctl.dtypes import DType
from precisionctl.errors import CheckpointError, DamagedCheckpoint
from precisionctl.model.model_shape import ModelShape
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FREQUENCIES = "rope_freqs.weight"
_FACTORS = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
ROTARY_TENSORS = {_FREQUENCIES, *_FACTORS}
_SAID_BY: Mapping[str, Set[str]] = {_FREQUENCIES: {"llama3", "proportional"}, **dict.fromkeys(_FACTORS, {"longrope"})}
"""The kinds of scaled rotary embeddings that each says."""

_MOST_FACTORS = 1 << 12
_STILL = 1e30
"""The factor of a pair of Gemma 4's that does not turn."""


def rotary_tensors(model: ModelShape) -> dict[str, NDArray[Any]]:
    """The tensors that llama.cpp divides frequencies by, FP32 `[pairs]`: of Llama 3's scaling and LongRoPE; of others
    none."""
    scaling = model.rope_scaling or {}
    if scaling.get("rope_type") == "longrope":
        return {name: np.array(scaling[key], np.float32) for name, key in _FACTORS.items()}
    if scaling.get("rope_type") == "proportional":
        assert model.global_attention
        pairs = (model.global_attention.kv_channels or model.kv_channels) // 2
        turned = int(pairs * scaling["partial_rotary_factor"])
        return {_FREQUENCIES: np.array([1.0] * turned + [_STILL] * (pairs - turned), np.float32)}
    if scaling.get("rope_type") == "llama3":
        turned = model.attention_of(in_window=False).rotary_size
        return {_FREQUENCIES: _llama3_factors(scaling, model.rotary_base, turned, max(turned, model.rotary_size) // 2)}
    return {}


def _llama3_factors(scaling: Mapping[str, Any], base: float, channels: int, pairs: int) -> NDArray[Any]:
    """Of so many channels that turn; of more pairs, which layers with a window alone turn, 1. With these (Step 3.5) the
    converter computes in FP64."""
    factor, low, high, original = (scaling[key] for key in OF_LLAMA3)
    frequencies = 1.0 / (base ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels))
    waves = 2 * np.pi / (frequencies.double() if 2 * pairs > channels else frequencies)
    smooth = (original / waves - low) / (high - low)
    factors = 1 / ((1 - smooth) / factor + smooth)
    factors = torch.where(waves < original / high, torch.ones_like(waves), factors)
    factors = torch.where(waves > original / low, torch.full_like(waves, factor), factors).float()
    found: NDArray[Any] = torch.nn.functional.pad(factors, (0, pairs - len(factors)), value=1.0).numpy()
    return found


def scaling_with_tensors(
    said: Fields, file: Described, family: GgufFamily, reference: ModelShape | None
) -> dict[str, Any] | None:
    """The scaling that fields say, with what tensors say of it.

    Raises DamagedCheckpoint for tensors that are no factors, or whose scaling the family does not have, CheckpointError
    for factors of which it is not known which settings they are.
    """
    factors = {}
    for name in sorted(ROTARY_TENSORS & file.tensors.keys()):
        if not _SAID_BY[name] & family.scalings.keys():
            what = f"`{name}` is there, and no rotary embeddings of llama.cpp's {file.architecture} are scaled by it"
            raise DamagedCheckpoint(what, do="Is the file of such a model?")
        tensor = file.tensors[name]
        if tensor.format.dtype != DType.float32 or len(tensor.shape) != 1 or not 0 < tensor.shape[0] <= _MOST_FACTORS:
            what = f"`{name}` is {tensor.format.name} {list(tensor.shape)}, no factors of rotary embeddings"
            raise DamagedCheckpoint(what)
        stored = read_bytes(GgufPart(name, tensor), name, 0, tensor.shape[0])
        factors[name] = stored.view(np.float32).reshape(-1)

    scaling = said["rope_scaling"]
    if _FREQUENCIES in factors and "proportional" in family.scalings:
        pairs = factors[_FREQUENCIES]
        turned = int((pairs == 1).sum())
        if not ((pairs[:turned] == 1).all() and (pairs[turned:] == np.float32(_STILL)).all()):
            raise CheckpointError(f"`{_FREQUENCIES}` are other factors than Gemma 4's", do=WITH_REFERENCE)
        scaling = {"rope_type": "proportional", "partial_rotary_factor": turned / len(pairs)}
    elif _FREQUENCIES in factors:
        scaling = {**(scaling or {}), **_llama3(factors[_FREQUENCIES], said, file, family, reference)}

    lists = {
        key: [shortest(each) for each in factors[name].tolist()] for name, key in _FACTORS.items() if name in factors
    }
    if lists:
        return {**(scaling or {}), "rope_type": "longrope", **lists}
    of_reference = reference and reference.rope_scaling or {}
    unsaid = scaling is None and of_reference.get("rope_type") in family.scalings.keys() & BEYOND_CONTEXT.keys()
    return dict(of_reference) if unsaid else scaling


def _llama3(
    factors: NDArray[np.float32], said: Fields, file: Described, family: GgufFamily, reference: ModelShape | None
) -> dict[str, Any]:
    """Llama 3's settings that make these factors: those of the reference, else Meta's."""
    beside = family.of_scaling({"rope_type": "llama3"})
    settings = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3, **beside}
    if reference and (reference.rope_scaling or {}).get("rope_type") == "llama3":
        settings |= reference.rope_scaling or {}
    numbers = (*(settings[key] for key in OF_LLAMA3), said["rotary_base"])
    turned, pairs = int(said["kv_channels"] * said.get("global_attention.rotary_percent", 1.0)), len(factors)
    fits = all(0 < number < math.inf for number in numbers) and 0 < turned <= 2 * pairs == said["kv_channels"]
    if not fits or not np.allclose(_llama3_factors(settings, said["rotary_base"], turned, pairs), factors, rtol=1e-5):
        if reference:
            raise DamagedCheckpoint(f"`{_FREQUENCIES}` are factors of another model than the reference")
        what = f"`{_FREQUENCIES}` are other factors than Llama 3's, and nothing else says of which settings"
        raise CheckpointError(what, do=WITH_REFERENCE)
    return settings
