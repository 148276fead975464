"""Rotary embeddings in a GGUF file: keys of the metadata, and tensors that are no weights, by which frequencies are
divided. These say how config.json scales them, or are compared with what it says.

Source: llama.cpp's converter (set_gguf_parameters and generate_extra_tensors of conversion/base.py, llama.py, phi.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from precisionctl.architectures.config_keys import Fields
from precisionctl.architectures.rope import LLAMA3, yarn_mscale
from precisionctl.checkpoints.base import WITH_REFERENCE
from precisionctl.checkpoints.chunks import read_bytes
from precisionctl.checkpoints.gguf.gguf_file import GgufTensor
from precisionctl.checkpoints.gguf.gguf_keys import GgufRule, Said, head_size, number, refused, write_only
from precisionctl.checkpoints.gguf.gguf_metadata import NEEDED, Described, shortest
from precisionctl.checkpoints.gguf.gguf_tensors import GgufPart
from precisionctl.dtypes import DType
from precisionctl.errors import CheckpointError, DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model_shape import ModelShape
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ORIGINAL = "original_max_position_embeddings"
_OF_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)
_OF_YARN = {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
"""What config.json says of YaRN, and the ends of keys."""

SCALINGS: Mapping[str, tuple[str, ...]] = {"default": (), "linear": ("factor",), "yarn": ("factor", _ORIGINAL)}
"""The kinds of scaled rotary embeddings that llama.cpp computes, with what config.json says of each: of a family that
has no others below."""
AND_LLAMA3 = {**SCALINGS, "llama3": _OF_LLAMA3}
LONGROPE = {"default": (), "longrope": (_ORIGINAL, "factor", "short_factor", "long_factor")}
"""Its factor is passed over, as in transformers where the original context is said."""
UNSCALED_ALONE = {"default": ()}
OF_LATENT = {kind: SCALINGS[kind] for kind in ("default", "yarn")}
"""Of families whose heads have one key, the latent: llama.cpp scales their scores as YaRN does, whatever the kind
(deepseek2.cpp, deepseek32.cpp)."""
AND_BETAS = {**SCALINGS, "yarn": (*SCALINGS["yarn"], "beta_fast", "beta_slow")}
"""Ministral 3's, whose betas llama.cpp reads (mistral3.cpp)."""


def always_of_yarn(scaling: Fields) -> Fields:
    """What llama.cpp computes YaRN with, whatever a file says, where a family has no entry for it (ggml.c,
    ggml_rope_yarn_corr_dims; attention_factor, llama-context.cpp)."""
    both = "mscale_all_dim" in scaling
    return {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "attention_factor": 1.0 if both else yarn_mscale(scaling["factor"], 1.0),
        **({} if both else {"mscale": scaling.get("mscale")}),  # alone it is no part of inference
    }


def mscales(*, any_number: bool = False, needed: bool = True) -> Callable[[Fields], Fields]:
    """What llama.cpp takes YaRN's mscale and mscale_all_dim for (llama-context.cpp): both for 1, or in `deepseek2` both
    for `any_number`. Where they are `needed`, it scales scores also without."""

    def of(scaling: Fields) -> Fields:
        if scaling.get("rope_type") != "yarn" or not (needed or "mscale_all_dim" in scaling):
            return {}
        return dict.fromkeys(("mscale", "mscale_all_dim"), scaling.get("mscale_all_dim", 1.0) if any_number else 1.0)

    return of


def _read_scaling(file: Described) -> dict[str, Any] | None:
    kind = file.said("rope.scaling.type")
    if kind in (None, "none", "longrope"):  # the last is said by tensors
        return None
    if kind not in ("linear", "yarn"):
        what = f"rotary scaling of type {shown(kind)}, which is not read of GGUF"
        raise UnknownArchitecture(what, where=file.where)
    scaling = {"rope_type": kind, "factor": file.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling[_ORIGINAL] = file.count("rope.scaling.original_context_length")
        said = {name: file.number(f"rope.scaling.yarn_{key}", None) for name, key in _OF_YARN.items()}
        scaling |= {name: number for name, number in said.items() if number is not None}
    return scaling


def _read_rope(file: Described) -> Fields:
    base = file.number("rope.freq_base", 10000.0)
    local = file.number("rope.freq_base_swa", base)
    return {
        "rotary_base": base,
        "rotary_base_local": None if local == base else local,
        "rope_scaling": _read_scaling(file),
    }


def _write_rope(model: ModelShape) -> Said:
    scaling = model.rope_scaling or {}
    found: dict[str, Any] = {}
    if (kind := scaling.get("rope_type")) in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(scaling["factor"])}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = scaling.get(_ORIGINAL) or model.max_position_embeddings
        said = {key: scaling.get(name) for name, key in _OF_YARN.items()}
        found |= {f"rope.scaling.yarn_{key}": float(value) for key, value in said.items() if value is not None}
    return {**found, "rope.freq_base": float(model.rotary_base)}


def _write_unusual_rope(model: ModelShape) -> Said:
    return {} if (model.rotary_base, model.rope_scaling) == (1e4, None) else _write_rope(model)


ROPE = GgufRule(("rotary_base", "rope_scaling"), _read_rope, _write_rope)
UNUSUAL_ROPE = GgufRule(ROPE.fields, _read_rope, _write_unusual_rope)
"""Of Gemma, whose base the converter does not write."""

_SECTIONS = [11, 11, 10, 0]


def _read_sections(file: Described) -> Fields:
    file.said("rope.dimension_sections")
    return {}


def _write_sections(model: ModelShape) -> Said:
    if model.rotary_size > 2 * sum(_SECTIONS):
        raise refused(model, f"that turns {model.rotary_size} channels of a head")
    return {"rope.dimension_sections": _SECTIONS}


SECTIONS = GgufRule((), _read_sections, _write_sections)
"""Which pairs go by height and width in an image: in text all dimensions of a position are the same."""
UNSCALED = write_only(lambda model: {"rope.scaling.type": "none"})
"""What ROPE reads too."""


def _read_stretched(file: Described) -> Fields:
    for key in ("factor", "original_context_length") if file.said("rope.scaling.type") == "none" else ():
        file.said(f"rope.scaling.{key}")
    return {}


STRETCHED = GgufRule((), _read_stretched)
"""Hunyuan's converter says what stretched the base, which is not scaled."""

LOCAL_BASE = number("rotary_base_local", "rope.freq_base_swa", 10000.0)


def _read_local_base_of_olmo3(file: Described) -> Fields:
    file.expect("rope.freq_base_swa", file.said("rope.freq_base"))
    return {"rotary_base_local": _read_rope(file)["rotary_base"]}


LOCAL_BASE_OF_OLMO3 = GgufRule(LOCAL_BASE.fields, _read_local_base_of_olmo3, LOCAL_BASE.write)
"""llama.cpp reads it and turns all layers with the one base (olmo2.cpp)."""

TURNED = GgufRule(
    ("rotary_percent",),
    lambda file: {"rotary_percent": file.count("rope.dimension_count", head_size(file)) / head_size(file)},
    lambda model: {"rope.dimension_count": model.rotary_size},
)
"""How many channels of a head turn."""


def _log_multiplier(share: float, *, needed: bool) -> GgufRule:
    """So much of what config.json calls mscale_all_dim, which may be `needed` of YaRN."""

    def read(file: Described) -> Fields:
        scaling = _read_scaling(file)
        of_yarn = bool(scaling and scaling["rope_type"] == "yarn")
        multiplier = file.number("rope.scaling.yarn_log_multiplier", NEEDED if needed and of_yarn else 0.0)
        if not multiplier or not scaling:
            return {}
        return {"rope_scaling": {**scaling, "mscale_all_dim": shortest(multiplier / share)}}

    def write(model: ModelShape) -> Said:
        scaling = model.rope_scaling or {}
        multiplier = share * scaling.get("mscale_all_dim", 0.0)
        return {"rope.scaling.yarn_log_multiplier": multiplier} if scaling.get("rope_type") == "yarn" else {}

    return GgufRule((), read, write)


LOG_MULTIPLIER, WHOLE_MULTIPLIER = _log_multiplier(0.1, needed=True), _log_multiplier(1.0, needed=False)
"""DeepSeek's, and Ministral 3's."""


def _context_before_longrope(model: ModelShape) -> int:
    return int((model.rope_scaling or {}).get(_ORIGINAL) or model.max_position_embeddings)


def _longrope_factor(original: int, most: int) -> float:
    return math.sqrt(1 + math.log(most / original) / math.log(original)) if 1 < original < most else 1.0


def _read_longrope(file: Described) -> Fields:
    most = file.count("context_length")
    original = file.count("rope.scaling.original_context_length", most)
    scaled = file.has("rope_factors_long.weight")
    usual = _longrope_factor(original, most) if scaled else 1.0
    if not math.isclose(file.number("rope.scaling.attn_factor", usual), usual, rel_tol=1e-5):
        what = f"phi3.rope.scaling.attn_factor is {shown(file.said('rope.scaling.attn_factor'))}, and {usual} as usual"
        raise UnknownArchitecture(what, where=file.where)
    return {"rope_scaling": {"rope_type": "longrope", _ORIGINAL: original}} if scaled else {}


def _write_longrope(model: ModelShape) -> Said:
    factor = _longrope_factor(_context_before_longrope(model), model.max_position_embeddings)
    return {"rope.scaling.attn_factor": factor} if model.rope_scaling else {}


ORIGINAL_CONTEXT = write_only(lambda model: {"rope.scaling.original_context_length": _context_before_longrope(model)})
LONGROPE_FACTOR = GgufRule((), _read_longrope, _write_longrope)
"""Phi-3's. These read and write the key of ORIGINAL_CONTEXT too."""

_FREQUENCIES = "rope_freqs.weight"
_FACTORS = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
ROTARY_TENSORS = {_FREQUENCIES, *_FACTORS}

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
        return {_FREQUENCIES: _llama3_factors(scaling, model.rotary_base, model.rotary_size)}
    return {}


def _llama3_factors(scaling: Mapping[str, Any], base: float, channels: int) -> NDArray[Any]:
    factor, low, high, original = (scaling[key] for key in _OF_LLAMA3)
    waves = 2 * np.pi / (1.0 / (base ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels)))
    smooth = (original / waves - low) / (high - low)
    factors = 1 / ((1 - smooth) / factor + smooth)
    factors = torch.where(waves < original / high, torch.ones_like(waves), factors)
    found: NDArray[Any] = torch.where(waves > original / low, torch.full_like(waves, factor), factors).numpy()
    return found


def scaling_with_tensors(said: Fields, file: Described, reference: ModelShape | None) -> dict[str, Any] | None:
    """The scaling that fields say, with what tensors say of it.

    Raises DamagedCheckpoint for tensors that are no factors, CheckpointError for factors of which it is not known which
    settings they are.
    """
    factors = {
        name: _factors(name, file.tensors[name], file.where) for name in sorted(ROTARY_TENSORS & file.tensors.keys())
    }
    scaling = said["rope_scaling"]
    if _FREQUENCIES in factors and file.architecture == "gemma4":
        scaling = _proportional(factors[_FREQUENCIES], file.where)
    elif _FREQUENCIES in factors:
        scaling = {**(scaling or {}), **_llama3(factors[_FREQUENCIES], said, reference, file)}
    lists = {
        key: [shortest(each) for each in factors[name].tolist()] for name, key in _FACTORS.items() if name in factors
    }
    return {**(scaling or {}), "rope_type": "longrope", **lists} if lists else scaling


def _factors(name: str, tensor: GgufTensor, where: object) -> NDArray[np.float32]:
    if tensor.format.dtype != DType.float32 or len(tensor.shape) != 1 or not 0 < tensor.shape[0] <= _MOST_FACTORS:
        what = f"`{name}` is {tensor.format.name} {list(tensor.shape)}, no factors of rotary embeddings"
        raise DamagedCheckpoint(what, where=where)
    return read_bytes(GgufPart(name, tensor), name, 0, tensor.shape[0]).view(np.float32).reshape(-1)


def _proportional(factors: NDArray[np.float32], where: object) -> dict[str, Any]:
    turned = int((factors == 1).sum())
    if not ((factors[:turned] == 1) & (factors[turned:] == np.float32(_STILL)).all()).all():
        raise CheckpointError(f"`{_FREQUENCIES}` are other factors than Gemma 4's", where=where, do=WITH_REFERENCE)
    return {"rope_type": "proportional", "partial_rotary_factor": turned / len(factors)}


def _llama3(
    factors: NDArray[np.float32], said: Fields, reference: ModelShape | None, file: Described
) -> dict[str, Any]:
    """Llama 3's settings that make these factors: those of the reference, else Meta's, which in Llama 4 blend none."""
    settings = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3}
    if file.architecture == "llama4":
        settings["high_freq_factor"] = settings["low_freq_factor"]
    if reference and (reference.rope_scaling or {}).get("rope_type") == "llama3":
        settings |= reference.rope_scaling or {}
    numbers = (*(settings[key] for key in _OF_LLAMA3), said["rotary_base"])
    fits = all(0 < number < math.inf for number in numbers) and 2 * len(factors) == said["kv_channels"]
    if not fits or not np.allclose(
        _llama3_factors(settings, said["rotary_base"], said["kv_channels"]), factors, rtol=1e-5
    ):
        if reference:
            raise DamagedCheckpoint(
                f"`{_FREQUENCIES}` are factors of another model than the reference", where=file.where
            )
        what = f"`{_FREQUENCIES}` are other factors than Llama 3's, and nothing else says of which settings"
        raise CheckpointError(what, where=file.where, do=WITH_REFERENCE)
    return settings
