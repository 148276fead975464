"""GGUF's tensors that are no weights: the factors by which frequencies of rotary embeddings are divided. They say how
config.json scales these, or are compared with what it says.

Source: llama.cpp's converter (generate_extra_tensors of conversion/llama.py and phi.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from precisionctl.architectures.rope import LLAMA3
from precisionctl.checkpoints.base import WITH_REFERENCE
from precisionctl.checkpoints.chunks import read_bytes
from precisionctl.checkpoints.gguf.gguf_file import GgufTensor
from precisionctl.checkpoints.gguf.gguf_metadata import shortest
from precisionctl.checkpoints.gguf.gguf_tensors import GgufPart
from precisionctl.dtypes import DType
from precisionctl.errors import CheckpointError, DamagedCheckpoint

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FREQUENCIES = "rope_freqs.weight"
_LONGROPE = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
ROTARY_TENSORS = {_FREQUENCIES, *_LONGROPE}

_MOST_FACTORS = 1 << 12


def with_rotary_tensors(
    config: dict[str, Any], tensors: Mapping[str, GgufTensor], reference: Mapping[str, Any], where: object
) -> dict[str, Any]:
    """The keys of a config.json, with what these tensors say of rotary embeddings. `reference` are the parameters of
    rotary embeddings in the config.json of a reference, or empty.

    Raises DamagedCheckpoint for tensors that are no factors, CheckpointError for factors of which it is not known which
    settings they are.
    """
    factors = {name: _factors(name, tensors[name], where) for name in sorted(ROTARY_TENSORS & tensors.keys())}
    rope = dict(config["rope_parameters"])
    if _FREQUENCIES in factors:
        rope |= _llama3(factors[_FREQUENCIES], config, reference, where)
    lists = {
        key: [shortest(each) for each in factors[name].tolist()] for name, key in _LONGROPE.items() if name in factors
    }
    if lists:
        rope |= {"rope_type": "longrope"} | lists
    return {**config, "rope_parameters": rope}


def _factors(name: str, tensor: GgufTensor, where: object) -> NDArray[np.float32]:
    if tensor.format.dtype != DType.float32 or len(tensor.shape) != 1 or not 0 < tensor.shape[0] <= _MOST_FACTORS:
        what = f"`{name}` is {tensor.format.name} {list(tensor.shape)}, no factors of rotary embeddings"
        raise DamagedCheckpoint(what, where=where)
    return read_bytes(GgufPart(name, tensor), name, 0, tensor.shape[0]).view(np.float32).reshape(-1)


def _llama3(
    factors: NDArray[np.float32], config: Mapping[str, Any], reference: Mapping[str, Any], where: object
) -> dict[str, Any]:
    """Llama 3's settings that make these factors: those of the reference, else Meta's."""
    settings = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3}
    settings |= {key: reference[key] for key in settings if key in reference}
    made = _llama3_factors(settings, config["rope_parameters"]["rope_theta"], config["head_dim"])
    if made is None or len(made) != len(factors) or not np.allclose(made, factors, rtol=1e-5):
        if reference:
            raise DamagedCheckpoint(f"`{_FREQUENCIES}` are factors of another model than the reference", where=where)
        what = f"`{_FREQUENCIES}` are other factors than Llama 3's, and nothing else says of which settings"
        raise CheckpointError(what, where=where, do=WITH_REFERENCE)
    return settings


def _llama3_factors(settings: Mapping[str, Any], base: float, channels: int) -> NDArray[np.float64] | None:
    """The factors of these settings; None if they make none."""
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    numbers = [settings[name] for name in names]
    if not all(type(number) in (int, float) and 0 < number < math.inf for number in (*numbers, base)):
        return None
    factor, low, high, original = numbers
    wavelengths = 2 * math.pi * base ** (np.arange(0, min(channels, 2 * _MOST_FACTORS), 2) / channels)
    if low == high:
        return np.where(wavelengths < original / high, 1.0, factor)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    made: NDArray[np.float64] = 1 / ((1 - smooth) / factor + smooth)
    return made
