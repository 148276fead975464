"""config.json as mlx-lm reads it: with the words of published files, which transformers 5 has others for."""

from collections.abc import Mapping
from typing import Any

_PARTIAL, _SCALING = "partial_rotary_factor", "rope_scaling"
_ASKED_FOR: Mapping[str, Mapping[str, Any]] = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    **dict.fromkeys(("glm4", "qwen3_next", "solar_open", "stablelm"), {_PARTIAL: 1.0}),
    "exaone4": {_SCALING: None},
    "glm4_moe": {_PARTIAL: 1.0, _SCALING: None},
}
"""Keys that mlx-lm's ModelArgs have no defaults for, and what they are where nothing else is said, by `model_type`."""


def as_mlx_reads(config: dict[str, Any], published: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json, with the keys that it lacks of the `published` one of the model."""
    rope = config.get("rope_parameters")
    rope = rope if isinstance(rope, Mapping) else {}
    asked_for = _ASKED_FOR.get(str(config.get("model_type")), {})
    found = {**asked_for, **{key: rope[key] for key in asked_for if key in rope}, **published, **config}
    scaling = found.get(_SCALING)
    if isinstance(scaling, Mapping) and "rope_type" in scaling:
        found[_SCALING] = {"type": scaling["rope_type"], **scaling}  # the older word, which alone Phi-3 knows
    return found
