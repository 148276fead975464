"""What the metadata of a GGUF file say of rotary embeddings.

Source: llama.cpp's converter (set_gguf_parameters of conversion/base.py and others).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from precisionctl.architectures.config_keys import NEEDED, Fields
from precisionctl.checkpoints.gguf.metadata import Described, shortest
from precisionctl.checkpoints.gguf.metadata_keys import GgufEntry, Said, SameAs, head_size, number, write_only
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_parts import yarn_mscale
from precisionctl.model.model_shape import ModelShape

ORIGINAL = "original_max_position_embeddings"
OF_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
"""How often a frequency turns in the original context between which YaRN blends; what is usual."""
_USUAL_BASE = 10000.0
_TYPE, _FACTOR, _CONTEXT = (f"rope.scaling.{key}" for key in ("type", "factor", "original_context_length"))
_OF_YARN = {
    "attention_factor": "rope.scaling.yarn_attn_factor",
    **{name: f"rope.scaling.yarn_{name}" for name in BETAS},
}
"""What config.json says of YaRN, and the keys."""
_MULTIPLIER = "rope.scaling.yarn_log_multiplier"

SCALINGS: Mapping[str, tuple[str, ...]] = {"default": (), "linear": ("factor",), "yarn": ("factor", ORIGINAL, *BETAS)}
"""The kinds of scaled rotary embeddings that llama.cpp computes, with what config.json says of each: of a family that
has no others below."""
AND_LLAMA3 = {**SCALINGS, "llama3": OF_LLAMA3}
BEYOND_CONTEXT: Mapping[str, tuple[str, ...]] = {"dynamic": ("factor",)}
"""What scales nothing within the context (InternLM3), and no file says."""
UNSCALED_ALONE = {"default": ()}
LONGROPE_ALONE = {**UNSCALED_ALONE, "longrope": (ORIGINAL, "factor", "short_factor", "long_factor")}
OF_LATENT = {kind: SCALINGS[kind] for kind in ("default", "yarn")}
"""Of families whose heads have one key, the latent: llama.cpp scales their scores as YaRN does, whatever the kind
(deepseek2.cpp, deepseek32.cpp)."""


def always_of_yarn(scaling: Fields) -> Fields:
    """What llama.cpp computes YaRN with, whatever a file says, where a family has no entry for it (ggml.c,
    ggml_rope_yarn_corr_dims; attention_factor, llama-context.cpp). Betas that a family does not read are options of its
    programs."""
    both = "mscale_all_dim" in scaling
    return {
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
    """Where no kind is said, llama.cpp scales by a factor as `linear` does; with `none`, in layers with a window alone
    (llama-context.cpp, llama_hparams::rope_freq_scale_train_swa). The original context is YaRN's and LongRoPE's."""
    kind, windows = file.said(_TYPE), bool(file.said("attention.sliding_window"))
    file.refuse(() if kind == "yarn" else _OF_YARN.values())
    file.refuse((_FACTOR,) if kind in (None, "longrope") or (kind == "none" and windows) else ())
    if kind in (None, "none", "longrope"):  # the last is said by tensors
        return None
    if kind not in ("linear", "yarn"):
        what = f"rotary scaling of type {shown(kind)}, which is not read of GGUF"
        raise UnknownArchitecture(what)
    scaling = {"rope_type": kind, "factor": file.number(_FACTOR)}
    if kind == "yarn":
        scaling[ORIGINAL] = file.count(_CONTEXT)
        said = {name: file.number(key, None) for name, key in _OF_YARN.items()}
        scaling |= {name: number for name, number in said.items() if number is not None}
    return scaling


def _read_rope(file: Described) -> Fields:
    base = file.number("rope.freq_base", _USUAL_BASE)
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
        found |= {_TYPE: kind, _FACTOR: float(scaling["factor"])}
    if kind == "yarn":
        found[_CONTEXT] = scaling.get(ORIGINAL) or model.max_position_embeddings
        said = {key: scaling.get(name) for name, key in _OF_YARN.items()}
        found |= {key: float(value) for key, value in said.items() if value is not None}
    return {**found, "rope.freq_base": float(model.rotary_base)}


def _write_unusual_base(model: ModelShape) -> Said:
    said = _write_rope(model)
    return {key: value for key, value in said.items() if (key, value) != ("rope.freq_base", _USUAL_BASE)}


ROPE = GgufEntry(
    ("rotary_base", "rope_scaling"),
    ("rope.freq_base", "rope.freq_base_swa", _TYPE, _FACTOR, _CONTEXT, *_OF_YARN.values()),
    _read_rope,
    _write_rope,
)
SAYS_UNSCALED = write_only(lambda model: {_TYPE: "none"})
"""Which ROPE reads."""
UNUSUAL_BASE = replace(ROPE, write=_write_unusual_base)
"""Of families whose files by the converter have no base: the one that llama.cpp takes then is not written."""
LOCAL_BASE = number("rotary_base_local", "rope.freq_base_swa", _USUAL_BASE)


def _read_same_base(file: Described) -> Fields:
    file.expect("rope.freq_base_swa", file.said("rope.freq_base"))
    return {"rotary_base_local": _read_rope(file)["rotary_base"]}


SAME_BASE = replace(LOCAL_BASE, read=_read_same_base)
"""Of families in which llama.cpp reads the base of layers with a window, and turns all with the one base (OLMo 3,
Mellum 2)."""
AS_ELSEWHERE: Fields = {"rotary_base_local": SameAs("rotary_base")}
"""What it computes there."""
TURNED = GgufEntry(
    ("rotary_percent",),
    ("rope.dimension_count",),
    lambda file: {"rotary_percent": file.count("rope.dimension_count", head_size(file)) / head_size(file)},
    lambda model: {"rope.dimension_count": model.rotary_size},
)
"""How many channels of a head turn."""


QUERY_SCALING = GgufEntry(
    ("query_scaling_beta",),
    ("attention.temperature_scale",),
    lambda file: {"query_scaling_beta": file.number("attention.temperature_scale", 0.0) or None},
    lambda model: {"attention.temperature_scale": model.query_scaling_beta or 0.0} if model.rope_scaling else {},
)
"""Of positions beyond the original context, which only scaled rotary embeddings have. 0 scales none."""


def _log_multiplier(share: float, *, needed: bool) -> GgufEntry:
    """So much of what config.json calls mscale_all_dim, which may be `needed` of YaRN."""

    def read(file: Described) -> Fields:
        scaling = _read_scaling(file)
        of_yarn = bool(scaling and scaling["rope_type"] == "yarn")
        multiplier = file.number(_MULTIPLIER, NEEDED if needed and of_yarn else 0.0)
        if not multiplier or not scaling:
            return {}
        return {"rope_scaling": {**scaling, "mscale_all_dim": shortest(multiplier / share)}}

    def write(model: ModelShape) -> Said:
        scaling = model.rope_scaling or {}
        multiplier = share * scaling.get("mscale_all_dim", 0.0)
        return {_MULTIPLIER: multiplier} if scaling.get("rope_type") == "yarn" else {}

    return GgufEntry((), (_MULTIPLIER,), read, write)


LOG_MULTIPLIER, WHOLE_MULTIPLIER = _log_multiplier(0.1, needed=True), _log_multiplier(1.0, needed=False)
"""DeepSeek's, and Ministral 3's."""
