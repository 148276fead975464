"""What llama.cpp computes of each family, and the metadata by which it does.

A model with a setting that llama.cpp's graph does not have is refused. Keys are in the order of llama.cpp's converter.

Sources: llama.cpp's src/models/*.cpp (load_arch_hparams and graphs), and conversion/*.py (set_gguf_parameters).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from precisionctl.checkpoints.gguf.gguf_names import FAMILIES
from precisionctl.checkpoints.gguf.metadata_bytes import GgufValue
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model_parts import MoE
from precisionctl.model_shape import ModelShape
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class LlamaCppModel:
    """What llama.cpp computes of a family.

    `given`: the fields of ModelShape that a file gives, beside those of all families; those of experts with a dot.
    `ignored`: those that llama.cpp does not look at, although it makes a difference. `computed`: the values of others
    that are computed, or how they follow from the model, where these are not ModelShape's defaults. `says_head`:
    whether the size of a head is written where it follows from others. `more`: keys that follow those of all families,
    without the architecture's name.
    """

    given: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    computed: Mapping[str, Any] = field(default_factory=dict)
    says_head: bool = True
    more: Callable[[ModelShape], Mapping[str, GgufValue]] = lambda model: {}


_GIVEN = (
    *("architecture", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "vocab_size", "padded_vocab_size", "max_position_embeddings", "make_vocab_size_divisible_by"),
    *("tied_embeddings", "norm_epsilon", "rotary_base", "rope_scaling", "wrapper"),
    # how Megatron stores it, which computes the same
    *("zero_centered_gamma", "add_bias_linear", "add_qkv_bias"),
)
_EXPERTS = ("moe.num_experts", "moe.topk", "moe.ffn_hidden_size")
_WINDOW = ("sliding_window", "window_layers")

_GEMMA = {"hf_zero_centered_gamma": True, "activation": "gelu_tanh", "rounded_embedding_multiplier": True}


def _every(number: int) -> Callable[[ModelShape], tuple[bool, ...]]:
    """Layers with a window: all but each of this number."""
    return lambda model: tuple((layer + 1) % number != 0 for layer in range(model.num_layers))


def _vocabulary_and_rope(model: ModelShape) -> dict[str, GgufValue]:
    return {"vocab_size": _u32(model.vocab_size), "rope.dimension_count": _u32(model.rotary_size)}


def _scales(model: ModelShape) -> dict[str, GgufValue]:
    """The multipliers of Granite."""
    return _vocabulary_and_rope(model) | {
        "attention.scale": _f32(_score_scale(model)),
        "embedding_scale": _f32(model.embedding_multiplier),
        "residual_scale": _f32(model.residual_multiplier),
        "logit_scale": _f32(model.logits_scaling),
    }


def _score_scale(model: ModelShape) -> float:
    """What scores are multiplied by."""
    return float((model.query_pre_attn_scalar or model.kv_channels) ** -0.5)


def _scored_as_gemma(layers_of_27b: int) -> Callable[[ModelShape], float | None]:
    """The `query_pre_attn_scalar` by which llama.cpp computes: in the largest model hidden_size / heads."""

    def scalar(model: ModelShape) -> float:
        largest = model.num_layers == layers_of_27b
        return model.hidden_size // model.num_attention_heads if largest else model.kv_channels

    return scalar


def _expert_size(model: ModelShape) -> dict[str, GgufValue]:
    return {"expert_feed_forward_length": _u32(model.moe.ffn_hidden_size)} if model.moe else {}


def _experts_of_qwen2(model: ModelShape) -> dict[str, GgufValue]:
    shared = model.moe.shared_ffn_hidden_size if model.moe else None
    return _expert_size(model) | ({"expert_shared_feed_forward_length": _u32(shared)} if shared else {})


def _softcaps(model: ModelShape) -> dict[str, GgufValue]:
    caps = {"attn_logit_softcapping": model.attn_logit_softcapping}
    caps["final_logit_softcapping"] = model.final_logit_softcapping
    return {key: _f32(cap) for key, cap in caps.items() if cap is not None}


def _window(model: ModelShape) -> dict[str, GgufValue]:
    return {"attention.sliding_window": _u32(model.sliding_window)} if model.sliding_window else {}


def _root_of_width(model: ModelShape) -> float:
    return float(model.hidden_size**0.5)


_LLAMA = LlamaCppModel(given=("qkv_bias", "proj_bias", "mlp_bias"), ignored=_WINDOW, more=_vocabulary_and_rope)
_QWEN3 = LlamaCppModel(ignored=_WINDOW, computed={"qk_layernorm": True})

MODELS: Mapping[str, LlamaCppModel] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": LlamaCppModel(given=_EXPERTS, ignored=_WINDOW, says_head=False, more=_vocabulary_and_rope),
    "granite": LlamaCppModel(
        given=(
            *("qkv_bias", "proj_bias", "mlp_bias"),
            *("query_pre_attn_scalar", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
        ),
        says_head=False,
        more=_scales,
    ),
    "qwen2": LlamaCppModel(ignored=_WINDOW, computed={"qkv_bias": True}, says_head=False),
    "qwen3": _QWEN3,
    "qwen2_moe": LlamaCppModel(
        given=(*_EXPERTS, "moe.shared_ffn_hidden_size"),
        ignored=_WINDOW,
        computed={"qkv_bias": True, "moe.pre_softmax": True, "moe.shared_expert_gate": True},
        says_head=False,
        more=_experts_of_qwen2,
    ),
    "qwen3_moe": LlamaCppModel(given=_EXPERTS, ignored=_WINDOW, computed=_QWEN3.computed, more=_expert_size),
    "gemma": LlamaCppModel(computed=_GEMMA | {"embedding_multiplier": _root_of_width}),
    "gemma2": LlamaCppModel(
        given=("sliding_window",),
        computed=_GEMMA
        | {
            "embedding_multiplier": _root_of_width,
            "post_layernorms": True,
            "query_pre_attn_scalar": _scored_as_gemma(46),
            "attn_logit_softcapping": lambda model: model.attn_logit_softcapping or 50.0,  # it always caps
            "final_logit_softcapping": lambda model: model.final_logit_softcapping or 30.0,
            "window_layers": _every(2),
        },
        more=lambda model: _softcaps(model) | _window(model),
    ),
    "gemma3_text": LlamaCppModel(
        given=("final_logit_softcapping", "sliding_window", "rotary_base_local"),
        computed=_GEMMA
        | {
            "embedding_multiplier": _root_of_width,
            "post_layernorms": True,
            "qk_layernorm": True,
            "query_pre_attn_scalar": _scored_as_gemma(62),
            "window_layers": _every(6),
        },
        more=lambda model: _softcaps(model) | _window(model),
    ),
    "gpt_oss": LlamaCppModel(
        given=(*_EXPERTS, "sliding_window"),
        computed={
            "qkv_bias": True,
            "proj_bias": True,
            "mlp_bias": True,
            "softmax_offset": True,
            "activation": "quick_gelu",
            "activation_clamp": 7.0,
            "glu_offset": 1.0,
            "window_layers": _every(2),
            "moe.router_bias": True,
        },
        more=lambda model: _window(model) | _expert_size(model),
    ),
}
"""By the `model_type` of the text model."""


def of_llama_cpp(model: ModelShape) -> LlamaCppModel:
    """What llama.cpp computes of this model. Raises UnknownArchitecture for one of which it would compute something
    else, or nothing."""
    computed = MODELS.get(model.architecture)
    if computed is None:
        raise UnknownArchitecture(
            f"`{model.architecture}` is not among the models that are written for llama.cpp",
            do=f"Known are {', '.join(sorted(MODELS))}. llama.cpp's convert_hf_to_gguf.py may "
            "know it: `convert --to hf --precision bf16` writes what that reads.",
        )
    for name, value, default in _settings(model):
        wanted = computed.computed.get(name, default)
        wanted = wanted(model) if callable(wanted) else wanted
        if name not in (*_GIVEN, *computed.given, *computed.ignored) and value != wanted:
            what = f"llama.cpp computes no `{model.architecture}` with {name} {shown(value)}, but with {shown(wanted)}"
            raise UnknownArchitecture(what, do="Serve it with an engine that does: see --target.")
    _check_rope(model)
    return computed


def _settings(model: ModelShape) -> Iterator[tuple[str, Any, Any]]:
    """The fields of a model, those of experts with a dot, each with its value and its default."""
    for each in fields(model):
        if each.name != "moe":
            yield each.name, getattr(model, each.name), None if each.default is MISSING else each.default
    if model.moe:
        everywhere = (True,) * model.num_layers
        for each in fields(MoE):
            default = everywhere if each.name == "layer_freq" else each.default
            yield f"moe.{each.name}", getattr(model.moe, each.name), default


_SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""What llama.cpp computes of each kind of scaling of rotary embeddings."""
_SUPPOSED = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""What it computes with, whatever the file says (ggml.c, ggml_rope_yarn_corr_dims; keys of these two are not read)."""


def _check_rope(model: ModelShape) -> None:
    """Raise UnknownArchitecture for a scaling of rotary embeddings that llama.cpp has not, or has otherwise."""
    scaling = dict(model.rope_scaling or {})
    kind = scaling.pop("rope_type", "default")
    if model.architecture == "gpt_oss":
        scaling.pop("truncate", None)  # false in all of them, and a note says it
    computed = ("type", "rope_theta", *_SCALINGS.get(kind, ()))
    supposed = _SUPPOSED if kind == "yarn" else {}
    others = {key: value for key, value in scaling.items() if key not in computed and value != supposed.get(key)}
    if others:
        kind += " with " + ", ".join(f"{key} {shown(value)}" for key, value in others.items())
    if kind not in _SCALINGS or (kind == "llama3" and model.architecture not in ("llama", "mistral", "granite")):
        what = f"llama.cpp computes no rotary embeddings of `{model.architecture}` that are scaled as {kind}"
        raise UnknownArchitecture(what, do="Serve it with an engine that does: see --target.")


def model_metadata(model: ModelShape, file_type: int) -> dict[str, GgufValue]:
    """What the file says of the model, under the name that its architecture has in llama.cpp. Raises as
    `of_llama_cpp`."""
    family, architecture = of_llama_cpp(model), FAMILIES[model.architecture].architecture
    found: dict[str, GgufValue] = {
        "block_count": _u32(model.num_layers),
        "context_length": _u32(model.max_position_embeddings),
        "embedding_length": _u32(model.hidden_size),
        "feed_forward_length": _u32(model.ffn_hidden_size),
        "attention.head_count": _u32(model.num_attention_heads),
        "attention.head_count_kv": _u32(model.num_query_groups),
        **_rope(model),
        "attention.layer_norm_rms_epsilon": _f32(model.norm_epsilon),
    }
    if model.moe:
        found |= {"expert_count": _u32(model.moe.num_experts), "expert_used_count": _u32(model.moe.topk)}
    if family.says_head or model.kv_channels * model.num_attention_heads != model.hidden_size:
        found |= {"attention.key_length": _u32(model.kv_channels), "attention.value_length": _u32(model.kv_channels)}
    named = {f"{architecture}.{key}": value for key, value in found.items()}
    more = {f"{architecture}.{key}": value for key, value in family.more(model).items()}
    return {**named, "general.file_type": _u32(file_type), **more}


def _rope(model: ModelShape) -> dict[str, GgufValue]:
    """The rotary embeddings. Llama 3's scaling is a tensor (`rope_factors`)."""
    scaling = model.rope_scaling or {}
    found: dict[str, GgufValue] = {}
    if (kind := scaling.get("rope_type")) in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": _f32(scaling["factor"])}
        if kind == "yarn":
            original = scaling.get("original_max_position_embeddings") or model.max_position_embeddings
            found["rope.scaling.original_context_length"] = _u32(original)
            for key in ("beta_fast", "beta_slow"):
                if scaling.get(key) is not None:
                    found[f"rope.scaling.yarn_{key}"] = _f32(scaling[key])
    found["rope.freq_base"] = _f32(model.rotary_base)
    if model.rotary_base_local is not None:
        found["rope.freq_base_swa"] = _f32(model.rotary_base_local)
    return found


def rope_factors(model: ModelShape) -> dict[str, NDArray[Any]]:
    """The tensor that llama.cpp divides each frequency of Llama 3's scaled rotary embeddings by, FP32 `[pairs]`; for
    other models none."""
    scaling = model.rope_scaling or {}
    if scaling.get("rope_type") != "llama3":
        return {}
    factor, low, high = (scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original, size = scaling["original_max_position_embeddings"], model.rotary_size
    waves = 2 * np.pi / (1.0 / (model.rotary_base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)))
    smooth = (original / waves - low) / (high - low)
    factors = 1 / ((1 - smooth) / factor + smooth)
    factors = torch.where(waves < original / high, torch.ones_like(waves), factors)
    factors = torch.where(waves > original / low, torch.full_like(waves, factor), factors)
    return {"rope_freqs.weight": factors.numpy()}


def _u32(number: int) -> GgufValue:
    return np.uint32(number)


def _f32(number: float) -> GgufValue:
    return np.float32(number)
