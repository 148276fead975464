"""config.json as mlx-lm reads it: with words of published files that transformers 5 has others for, and its own."""

from collections.abc import Mapping, Sequence
from typing import Any

from precisionctl.checkpoints.mlx.mlx_names import ALONE_IN_WRAPPER
from precisionctl.dtypes import DType
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.text_config import text_part
from precisionctl.untrusted.safe_json import mapping_or_empty

_PARTIAL, _SCALING = "partial_rotary_factor", "rope_scaling"
_UNBIASED, _ANY_STEP = {"attention_bias": False}, {"time_step_limit": [0.0, 1e308]}
_ASKED_FOR: Mapping[str, Mapping[str, Any]] = {
    "apertus": {**_UNBIASED, "mlp_bias": False, "post_norm": False, "qk_norm": True},
    **dict.fromkeys(("granite", "granitemoe", "olmo_hybrid"), _UNBIASED),
    **dict.fromkeys(("exaone4", "glm4_moe"), {_SCALING: None}),
    "granitemoehybrid": _ANY_STEP,
    "kimi_linear": {"head_dim": None, "rope_theta": 10000.0},
    "llama4_text": {**_UNBIASED, _SCALING: None},
    "mamba2": {**_ANY_STEP, "intermediate_size": 0, "time_step_rank": "auto"},
    "nemotron_h": {"n_shared_experts": 1},
    "solar_open": {"intermediate_size": 0},
}
"""Keys that mlx-lm's ModelArgs have no defaults for, or others than transformers, and what they are where nothing else
is said, by `model_type`."""

_TURNING_A_PART = ("glm4", "glm4_moe", "phi", "qwen3_next", "solar_open", "stablelm")
"""Families of which the same is so of how much of a head rotary embeddings turn."""


def words_of_mlx(model: ModelShape, dtype: DType) -> dict[str, Any]:
    """The keys of a text model's config.json that say something else to mlx-lm, or that transformers does not read."""
    name, found = model.architecture, dict[str, Any](dtype=dtype.value, torch_dtype=dtype.value)
    windows = model.windows
    if model.wrapper:  # of whose text model each class believes another part of config.json
        found["tie_word_embeddings"] = model.tied_embeddings
    if name in _TURNING_A_PART:
        found[_PARTIAL] = model.rotary_percent
    if name == "exaone4":
        pattern = "".join("L" if window else "G" for window in windows)
        found["sliding_window_pattern"] = pattern if any(windows) else None
    if name in WINDOWS_BUT_EACH:
        found["sliding_window_pattern"] = each_without(windows)
    if name in DELTA_NETS_BUT_EACH and model.gdn:
        found["full_attention_interval"] = each_without(model.gdn.layers)
    if name == "gemma4_text":
        found["final_logit_softcapping"] = model.final_logit_softcapping
    if name == "muse_glimmer_text":
        turning = map(model.has_rope, range(model.num_layers))
        found["layer_rope_theta"] = [model.rotary_base if turns else 0 for turns in turning]
    if name == "bailing_moe" and model.moe:
        found["moe_router_enable_expert_bias"] = model.moe.expert_bias
    if name == "llama4_text":
        found["interleave_moe_layer_step"] = each_with_experts(model)
    if model.moe and name in _MAY_BE_NORMALISED:
        found["norm_topk_prob"] = not model.moe.pre_softmax
    if name == "minimax_m2":
        found["rotary_dim"] = model.rotary_size
    if name == "nemotron_h":
        found["mamba_proj_bias"] = False  # of which transformers takes no notice
    if model.moe and name in DENSE_FIRST:
        found["first_k_dense_replace"] = model.moe.layer_freq.count(False)
    if name == "granitemoehybrid":  # null means rotary embeddings to mlx-lm, and none to transformers
        turns = any(map(model.has_rope, range(model.num_layers)))
        found["position_embedding_type"] = "rope" if turns else "nope"
    if name == "granitemoehybrid" and not model.moe:  # transformers has that of experts that are not there
        found["intermediate_size"] = model.ffn_hidden_size
    if name == "jamba" and model.moe and (places := places_of_experts(model)):
        found |= dict(zip(("expert_layer_period", "expert_layer_offset"), places, strict=True))
    if name == "lfm2":  # whose other two keys for it would be made smaller again
        found |= {"block_ff_dim": model.ffn_hidden_size, "block_auto_adjust_ff_dim": False}
    return found


_MAY_BE_NORMALISED = ("qwen3_5_moe_text", "qwen3_moe")
"""Families whose weights of experts mlx-lm normalises as config.json says, and transformers in some of their wrappers
whatever it says."""


DENSE_FIRST = (
    *("deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
    *("kimi_k2", "bailing_moe", "kimi_linear", "solar_open"),
)
"""Families whose config.json says of how many first layers experts are not."""


WINDOWS_BUT_EACH = ("cohere2", "gemma3_text")
"""Families of which each layer of a certain number has no window, and all between these have it."""


DELTA_NETS_BUT_EACH = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""The same, of delta nets."""


def each_without(layers: Sequence[bool]) -> int | None:
    """Of how many layers each last one has no window, and all others have it; None where there is no such number."""
    several = range(2, len(layers) + 2)
    fits = (each for each in several if all((at % each != 0) is has for at, has in enumerate(layers, 1)))
    return next(fits, None)


def places_of_experts(model: ModelShape) -> tuple[int, int] | None:
    """Period and offset of a Jamba's layers with experts. transformers subtracts the offset from a layer's number, and
    mlx-lm adds it; None where no two numbers mean the same to both."""
    has = [model.has_experts(layer) for layer in range(1, model.num_layers, 2)]  # a layer is two of Megatron's
    pairs = ((period, offset) for period in range(1, len(has) + 1) for offset in range(period))
    fits = (
        (period, offset)
        for period, offset in pairs
        if all(((at - offset) % period == 0) is ((at + offset) % period == 0) is each for at, each in enumerate(has))
    )
    return next(fits, None)


def each_with_experts(model: ModelShape) -> int | None:
    """Of how many layers each last one has experts, and no other; None where there is no such number."""
    if model.moe and all(model.moe.layer_freq):
        return 1
    return each_without([not model.has_experts(layer) for layer in range(model.num_layers)])


_OVERRULED = ("rope_theta", _SCALING)
"""Keys that transformers passes over where `rope_parameters` has another value, and mlx-lm does not."""

_ROPE_IN_ONE_OBJECT = ("minimax_m3_vl_text", "ministral3", "qwen3_5_moe_text", "qwen3_5_text")
"""Families whose class looks for all of rotary embeddings in `rope_parameters`, and takes defaults without."""


def as_mlx_reads(config: Mapping[str, Any], published: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json, with the keys that it lacks of the `published` one of the text model, and with `words_of_mlx`.
    Of a wrapper's, what it says of towers of images goes, as in what `mlx_lm.convert` writes."""
    text, config = text_part(config), {key: value for key, value in config.items() if key != "vision_config"}
    if config.get("model_type") in ALONE_IN_WRAPPER:
        made = _of_text(config, published, words)
        tokens = {key: value for key, value in made.items() if key.endswith("_token_id")}
        return {"model_type": ALONE_IN_WRAPPER[made["model_type"]], **tokens, "text_config": made}
    if not isinstance(text, Mapping):
        return _of_text(config, published, words)
    made = _of_text(text, {key: value for key, value in published.items() if key != "architectures"}, words)
    own = {"vocab_size": made["vocab_size"]} if config["model_type"] in _OWN_VOCABULARY else {}
    return {**config, "text_config": made, **own}


_OWN_VOCABULARY = ("gemma3", "gemma4", "gemma4_unified")
"""Wrappers whose own `vocab_size` mlx-lm's class takes, or a default."""


def _of_text(config: Mapping[str, Any], published: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    model_type, rope = config.get("model_type"), mapping_or_empty(config.get("rope_parameters"))
    asked_for = _ASKED_FOR.get(str(model_type), {})
    turning = {_PARTIAL: rope[_PARTIAL]} if _PARTIAL in rope else {}
    known = {key: value for key, value in published.items() if value is not None}
    overruled = {key: known[key] for key in _OVERRULED if key in known}
    found = {**asked_for, **turning, **known, **config, **overruled, **words}
    if model_type == "granitemoehybrid":
        found["layer_types"] = published["layer_types"]  # transformers 5 has the words of other families
    by_kind_of_layer = any(isinstance(value, Mapping) for value in rope.values())
    if by_kind_of_layer and published.get(_SCALING) and "rope_parameters" not in published:
        del found["rope_parameters"]  # of OLMo 3: a second word for the same
    scaling = found.get(_SCALING)
    if model_type in _ROPE_IN_ONE_OBJECT:
        apart = {key: found[key] for key in ("rope_theta", _PARTIAL) if key in found}
        found["rope_parameters"] = {"rope_type": "default", **rope, **(scaling or {}), **apart}
    if isinstance(scaling, Mapping) and "rope_type" in scaling:
        found[_SCALING] = {"type": scaling["rope_type"], **scaling}  # the older word, which alone Phi-3 knows
    return found
