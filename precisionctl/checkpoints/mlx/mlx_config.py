"""config.json as mlx-lm reads it: with words of published files that transformers 5 has others for, and its own."""

from collections.abc import Mapping, Sequence
from typing import Any

from precisionctl.dtypes import DType
from precisionctl.model.model_shape import ModelShape

_PARTIAL, _SCALING = "partial_rotary_factor", "rope_scaling"
_ASKED_FOR: Mapping[str, Mapping[str, Any]] = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    **dict.fromkeys(("glm4", "qwen3_next", "solar_open", "stablelm"), {_PARTIAL: 1.0}),
    "exaone4": {_SCALING: None},
    "glm4_moe": {_PARTIAL: 1.0, _SCALING: None},
}
"""Keys that mlx-lm's ModelArgs have no defaults for, and what they are where nothing else is said, by `model_type`."""


def words_of_mlx(model: ModelShape, dtype: DType) -> dict[str, Any]:
    """The keys of config.json that say something else to mlx-lm, or that transformers does not read."""
    found: dict[str, Any] = {"dtype": dtype.value, "torch_dtype": dtype.value}
    windows = [model.in_window(layer) for layer in range(model.num_layers)]
    if model.model_type == "exaone4":
        pattern = "".join("L" if window else "G" for window in windows)
        found["sliding_window_pattern"] = pattern if any(windows) else None
    if model.model_type in WINDOWS_BUT_EACH:
        found["sliding_window_pattern"] = each_without_window(windows)
    if model.model_type == "minimax_m2":
        found["rotary_dim"] = int(model.kv_channels * model.rotary_percent)
    if model.model_type == "nemotron_h":
        found["mamba_proj_bias"] = False  # of which transformers takes no notice
    if model.moe and model.model_type in DENSE_FIRST:
        found["first_k_dense_replace"] = model.moe.layer_freq.count(False)
    if model.model_type == "granitemoehybrid" and not model.moe:  # transformers has that of experts that are not there
        found["intermediate_size"] = model.ffn_hidden_size
    if model.model_type == "lfm2":  # whose other two keys for it would be made smaller again
        found |= {"block_ff_dim": model.ffn_hidden_size, "block_auto_adjust_ff_dim": False}
    return found


DENSE_FIRST = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2"),
    "solar_open",
)
"""Families whose config.json says of how many first layers experts are not."""


WINDOWS_BUT_EACH = ("cohere2", "gemma3_text")
"""Families of which each layer of a certain number has no window, and all between these have it."""


def each_without_window(windows: Sequence[bool]) -> int | None:
    """Of how many layers each last one has no window, and all others have it; None where there is no such number."""
    several = range(2, len(windows) + 2)
    fits = (each for each in several if all((at % each != 0) is has for at, has in enumerate(windows, 1)))
    return next(fits, None)


def as_mlx_reads(config: Mapping[str, Any], published: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json, with the keys that it lacks of the `published` one of the model, and with `words_of_mlx`."""
    model_type, said = config.get("model_type"), config.get("rope_parameters")
    rope = said if isinstance(said, Mapping) else {}
    asked_for = _ASKED_FOR.get(str(model_type), {})
    turning = {_PARTIAL: rope[_PARTIAL]} if _PARTIAL in rope else {}
    known = {key: value for key, value in published.items() if value is not None}
    found = {**asked_for, **turning, **known, **config, **words}
    if model_type == "granitemoehybrid":
        found["layer_types"] = published["layer_types"]  # transformers 5 has the words of other families
    by_kind_of_layer = any(isinstance(value, Mapping) for value in rope.values())
    if by_kind_of_layer and published.get(_SCALING) and "rope_parameters" not in published:
        del found["rope_parameters"]  # of OLMo 3: a second word for the same
    scaling = found.get(_SCALING)
    if isinstance(scaling, Mapping) and "rope_type" in scaling:
        found[_SCALING] = {"type": scaling["rope_type"], **scaling}  # the older word, which alone Phi-3 knows
    return found
