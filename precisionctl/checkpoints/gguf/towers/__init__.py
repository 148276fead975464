"""The towers that llama.cpp has in a second file, `mmproj`, each in the file of its makers."""

from collections.abc import Callable, Mapping
from typing import Any

from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.gguf.towers import (
    tower_gemma3,
    tower_gemma4,
    tower_glm,
    tower_internvl,
    tower_kimi,
    tower_llama4,
    tower_pixtral,
    tower_qwen,
)
from precisionctl.checkpoints.gguf.towers.tower import Tower, TowerSettings, no_tower
from precisionctl.model.model_shape import ModelShape
from precisionctl.untrusted.safe_json import parse_json

MADE_BY: Mapping[str, Callable[[TowerSettings], Tower]] = {
    "qwen2_vl": tower_qwen.qwen2_vl,
    "qwen2_5_vl": tower_qwen.qwen2_5_vl,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), tower_qwen.qwen3_vl),
    "gemma3": tower_gemma3.gemma3,
    "gemma4": tower_gemma4.gemma4,
    **dict.fromkeys(("glm4v", "glm46v", "glm4v_moe"), tower_glm.glm4v),
    "glm_ocr": tower_glm.glm_ocr,
    "llava": tower_pixtral.pixtral,
    "mistral3": tower_pixtral.mistral3,
    "internvl": tower_internvl.internvl,
    "llama4": tower_llama4.llama4,
    "kimi_k25": tower_kimi.kimi_k25,
}
"""By the `model_type` of the wrapper."""

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    **tower_qwen.DEFAULTS,
    **tower_glm.DEFAULTS,
    **tower_pixtral.DEFAULTS,
    "gemma3": tower_gemma3.DEFAULTS,
    "gemma4": tower_gemma4.DEFAULTS,
    "internvl": tower_internvl.DEFAULTS,
    "llama4": tower_llama4.DEFAULTS,
    "kimi_k25": tower_kimi.DEFAULTS,
}
_WITHIN = ("media_proc_cfg", "image_processor")
"""Parts of the files about images that may have what others have at their top."""


def tower_of(model: ModelShape, companions: Companions) -> Tower:
    """The tower of a wrapper's `model`, as config.json and its like describe it. Raises UnknownArchitecture for one
    that llama.cpp has not, or of which it would compute something else."""
    assert model.wrapper is not None, "only a wrapper has towers"
    kind = model.wrapper.model_type
    if kind not in MADE_BY:
        raise no_tower(f"the towers of a `{kind}` are not among those that are written for llama.cpp")
    config = _parsed(companions, "config.json")
    tower = config.get("vision_config")
    if not isinstance(tower, Mapping):
        raise no_tower("its config.json has no `vision_config`")
    processor = dict[str, Any]()
    for name in ("preprocessor_config.json", "processor_config.json"):
        said = _parsed(companions, name)
        for part in (said, *(said[key] for key in _WITHIN if isinstance(said.get(key), Mapping))):
            processor |= part
    settings = {**_DEFAULTS[kind], **tower}
    return MADE_BY[kind](TowerSettings(model, config, settings, processor, companions.files.get("tokenizer.json")))


def _parsed(companions: Companions, name: str) -> Mapping[str, Any]:
    return parse_json(companions.files[name], name) if name in companions.files else {}
