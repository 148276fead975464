"""config.json made of Mistral's params.json: Mistral, Ministral, Ministral 3, Mixtral, Mistral 4 (and Large 3), and
Mistral 3's wrapper around these.

Sources: vLLM, transformers_utils/configs/mistral.py; transformers, integrations/mistral/native_config.py and
params_conversion.py (after 5.24), models/mistral*/convert_*_to_hf.py; mistral-inference 1.6, args.py, cache.py.

Traps: a missing `rope_theta` is 10,000 to one of these programs and 1,000,000 to another, so it is no number of the
model. Where `yarn.apply_scale` is false, YaRN magnifies nothing. In Mistral 4's class `mscale_all_dim`, by which
transformers' converter says that of the others, magnifies all scores, and vLLM and SGLang measured that this is wrong
(vLLM's pull request 57563, SGLang's 26203): there an `attention_factor` of 1 says it.
"""

from collections.abc import Mapping
from typing import Any

from precisionctl.architectures.config_keys import layers
from precisionctl.checkpoints.base import WITH_REFERENCE
from precisionctl.checkpoints.consolidated.params import MadeConfig, ParamsJson, in_its_words
from precisionctl.errors import DamagedCheckpoint, PrecisionError, shown

_SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
_WORDS = {theirs: own for own, theirs in _SIZES.items()}
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_EXPERTS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "routed_scale": "routed_scaling_factor",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
}
_VISION = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels", "image_size")
_POSITIONS = 32768
"""What transformers takes where nothing is said: Mistral 7B v0.3's."""


def mistral_config(said: ParamsJson) -> MadeConfig:
    """The config.json of a model that a params.json describes.

    Raises DamagedCheckpoint for keys that are missing or not of their kind, UnknownArchitecture for a model that is not
    read, PrecisionError for codes that are not.
    """
    said.only("model_type", "transformer")
    said.only("activation", "silu")
    said.skip("max_batch_size")
    text = {theirs: said.take(own) for own, theirs in _SIZES.items()}
    text["tie_word_embeddings"] = said.take("tied_embeddings", False)
    longest = said.take("max_seq_len", None)
    positions = said.take("max_position_embeddings", longest)
    notes = list[str]()
    if positions is None:
        positions = said.known.max_position_embeddings if said.known else _POSITIONS
        notes.append(f"params.json does not say how long a text may be: {positions} is written, as in transformers.")
    text["max_position_embeddings"] = positions
    latent = {key: said.take(key, None) for key in _LATENT}
    kind = _kind(said, text, {key: value for key, value in latent.items() if value is not None})
    text = {"architectures": [kind[1]], "model_type": kind[0], **text}
    vision = said.section("vision_encoder")
    quantization = _quantization(said)
    said.check_read()
    config = _around(vision, text) if vision else text
    config |= {"quantization_config": quantization} if quantization else {}
    return MadeConfig(config, _WORDS, tuple(notes))


def _kind(said: ParamsJson, text: dict[str, Any], latent: dict[str, Any]) -> tuple[str, str]:
    """The `model_type` and the class of a text model, whose other keys are added to `text`."""
    yarn, experts = "yarn" in said, said.section("moe")
    text |= _rope(said, latent=bool(latent))
    _add_window(said, text)
    if latent:
        if experts is None or text["sliding_window"] is not None:
            raise said.unread("latent attention without experts, or with a window")
        text |= latent | {own: experts.take(key) for key, own in _EXPERTS.items()} | {"norm_topk_prob": True}
        experts.only("route_every_n", 1)
        experts.skip("expert_parallel", "expert_model_parallel")
        experts.check_read()
        del text["sliding_window"]
        return "mistral4", "Mistral4ForCausalLM"
    if experts:
        if yarn:
            raise said.unread("experts as Mixtral has them, and YaRN")
        text["num_local_experts"] = experts.take("num_experts")
        text["num_experts_per_tok"] = experts.take("num_experts_per_tok")
        experts.check_read()
        return "mixtral", "MixtralForCausalLM"
    if yarn:
        return "ministral3", "Ministral3ForCausalLM"
    if "layer_types" in text:
        return "ministral", "MinistralForCausalLM"
    return "mistral", "MistralForCausalLM"


def _rope(said: ParamsJson, *, latent: bool) -> dict[str, Any]:
    """The keys of rotary embeddings. Classes that are older than transformers 5 have one for the base alone."""
    theta = said.take("rope_theta", said.known.rotary_base if said.known else None)
    if theta is None:
        raise DamagedCheckpoint("no `rope_theta`", do=WITH_REFERENCE)
    yarn, growing = said.section("yarn"), said.section("llama_4_scaling")
    if yarn is None:
        if growing:
            raise said.unread("llama_4_scaling without yarn")
        return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}} if latent else {"rope_theta": theta}
    original, scaled = yarn.take("original_max_position_embeddings"), yarn.take("apply_scale")
    found = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": yarn.take("factor"),
        "original_max_position_embeddings": original,
        "beta_fast": yarn.take("beta"),
        "beta_slow": yarn.take("alpha"),
    }
    yarn.check_read()
    if type(scaled) is not bool:
        raise DamagedCheckpoint(f"yarn.apply_scale is {shown(scaled)}, not true or false")
    if not latent:
        found |= {"mscale": 1.0, "mscale_all_dim": 0.0 if scaled else 1.0}
    elif scaled:
        raise said.unread("latent attention with yarn.apply_scale, which programs compute in different ways,")
    else:
        found["attention_factor"] = 1.0
    found["llama_4_scaling_beta"] = growing.take("beta") if growing else 0.0
    if growing:
        if (start := growing.take("original_max_position_embeddings")) != original:
            what = f"llama_4_scaling begins at {shown(start)}, and yarn.original_max_position_embeddings is "
            raise said.unread(f"{what}{shown(original)}")
        growing.check_read()
    return {"rope_parameters": found}


def as_transformers_magnifies(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the rotary parameters of Mistral 4's text model as transformers' converter writes them, which
    published ones have: its class magnifies scores by them."""
    found, text = dict(config), dict(config.get("text_config", config))
    rope = {key: value for key, value in text["rope_parameters"].items() if key != "attention_factor"}
    text["rope_parameters"] = rope | {"mscale": 1.0, "mscale_all_dim": 1.0}
    return found | {"text_config": text} if "text_config" in found else text


def _add_window(said: ParamsJson, text: dict[str, Any]) -> None:
    """The window that every layer has, or that a pattern of layers has, which repeats. mistral-inference reads either
    key: under the one with an underscore vLLM does not see it."""
    windows = [each for key in ("sliding_window", "_sliding_window") if (each := said.take(key, None)) is not None]
    if len(windows) > 1 and windows[0] != windows[1]:
        raise DamagedCheckpoint("sliding_window and _sliding_window", do="Keep the one that is meant.")
    window = windows[0] if windows else None
    if isinstance(window, str) and window.isascii() and window.isdigit() and len(window) < 16:  # some say "4096"
        window = int(window)
    if isinstance(window, list):
        with in_its_words(_WORDS):
            number = layers(text)
        pattern = [each is not None for each in window]
        sizes = [each for each in window if each is not None]
        if not pattern or number % len(pattern) or any(each != sizes[0] for each in sizes):
            what = f"sliding_window is {shown(window)}, no pattern with one window for {number} layers"
            raise DamagedCheckpoint(what)
        repeated = pattern * (number // len(pattern))
        text["layer_types"] = ["sliding_attention" if each else "full_attention" for each in repeated]
        window = sizes[0] if sizes else None
    text["sliding_window"] = window


def _quantization(said: ParamsJson) -> dict[str, Any] | None:
    """The `quantization_config` of its codes: Mistral's own FP8, or compressed-tensors', under either key."""
    own, theirs = said.take("quantization", None), said.take("quantization_config", None)
    if own is not None and theirs is not None:
        what = "`quantization` and `quantization_config` both say how weights are coded"
        raise DamagedCheckpoint(what, do="Keep the one that is meant.")
    found = own if theirs is None else theirs
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise DamagedCheckpoint(f"quantization is {shown(found)}, not an object")
    if str(found.get("quant_method", "")).lower().replace("_", "-") == "compressed-tensors":
        return {**found, "quant_method": "compressed-tensors"}
    section = ParamsJson(found, within="quantization.")
    form, scheme = section.take("qformat_weight", None), section.take("qscheme_act", "TENSOR")
    if form != "fp8_e4m3" or scheme not in ("TENSOR", "NO_SCALES"):
        what = f"codes of {shown(dict(found))}"
        raise PrecisionError(what, do="Known are fp8_e4m3, and compressed-tensors.")
    section.check_read()
    return {
        "quant_method": "fp8",
        "activation_scheme": "static" if scheme == "TENSOR" else "dynamic",
        "weight_block_size": None,
    }


def _around(vision: ParamsJson, text: dict[str, Any]) -> dict[str, Any]:
    """Mistral 3's wrapper around a text model. Raises UnknownArchitecture for Pixtral's, which merges no patches."""
    vision.only("mm_projector_id", "patch_merge")
    vision.only("add_pre_mm_projector_layer_norm", True)
    vision.skip("image_break_token_id", "image_end_token_id", "max_image_size")  # of what makes inputs of images
    theta = vision.take("rope_theta")
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "image_token_index": vision.take("image_token_id"),
        "multimodal_projector_bias": vision.take("adapter_bias"),
        "projector_hidden_act": "gelu",
        "spatial_merge_size": vision.take("spatial_merge_size"),
        "vision_feature_layer": -1,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
        "vision_config": {
            "model_type": "pixtral",
            "hidden_act": "silu",
            "patch_size": vision.take("patch_size"),
            **{key: vision.take(key) for key in _VISION},
            "rope_theta": theta,
        },
    }
    vision.check_read()
    return config
