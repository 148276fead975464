"""Which models mlx-lm loads, and what it computes otherwise than transformers."""

from collections.abc import Iterator, Mapping
from math import isclose
from typing import Any

from precisionctl.checkpoints.mlx.mlx_config import (
    DELTA_NETS_BUT_EACH,
    DENSE_FIRST,
    WINDOWS_BUT_EACH,
    each_with_experts,
    each_without,
    places_of_experts,
    words_of_mlx,
)
from precisionctl.checkpoints.mlx.mlx_names import RENAMED, WRAPPED, is_known
from precisionctl.dtypes import DType
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_parts import yarn_mscale
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.text_config import text_part
from precisionctl.model.untabled_model import UntabledModel


def check_loaded(model: ModelShape) -> None:
    """Raise UnknownArchitecture for a model that mlx-lm does not load as it is, or was not seen to. That of a known
    family without a table is the one that says which setting no table here has."""
    name = model.model_type
    if isinstance(model, UntabledModel) and (name in RENAMED or name in WRAPPED):
        raise model.why
    if not is_known(model):
        within = f"mlx-lm has no {name} around a {shown(model.architecture)}"
        what = within if name in WRAPPED else f"what mlx-lm stores of a {shown(name)} is not known here"
    elif why := _why_not_loaded(model):
        what = f"mlx-lm has no {name} with {why}, as this model has"
    else:
        return
    raise UnknownArchitecture(
        what, do="--target llama.cpp may have it. docs/mlx.md names the families that are written."
    )


_ALWAYS_TIED = ("cohere", "cohere2", "gemma", "gemma2", "gemma3n_text", "lfm2", "lfm2_moe")
UNUSED_KEPT = ("gemma3n_text",)
"""Families whose classes keep tensors that no token is computed with, and do not load without them."""
_NEVER_TIED = (
    "deepseek",
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss"),
    *("gpt_neox", "gptj", "helium", "kimi_k2", "llama4_text", "nemotron_h", "phi", "phimoe", "qwen2_moe"),
    *("solar_open", "stablelm", "step3p5"),
)
_WITHOUT_BIASES = ("apertus", "dots1", "gemma", "gemma2", "gemma3_text", "laguna", "qwen3", "qwen3_moe")
_HEADS_MAKE_WIDTH = ("bailing_moe", "cohere2", "exaone", "helium", "internlm3", "mimo", "mixtral", "nemotron-nas")
_FOUR_TIMES = ("gpt_neox", "gptj")
"""Families whose MLPs are four times as wide as the model."""
_ONE_EXPERT_AS_IT_IS = (
    *("afmoe", "deepseek_v3", "deepseek_v32", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
    *("bailing_moe", "kimi_k2", "kimi_linear", "nemotron_h", "solar_open"),
)
"""Families whose routers divide an expert's weight by the sum over the chosen ones if these are several."""
_WITHOUT_WINDOWS = (
    *("dots1", "gemma2", "mimo", "ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_moe", "starcoder2"),
)
_SCALINGS = {
    **dict.fromkeys(("cohere", "cohere2", "ernie4_5", "gemma2", "gemma3n_text", "glm4", "glm4_moe"), ()),
    **dict.fromkeys(("helium", "lfm2_moe"), ()),
    **dict.fromkeys(
        ("gpt_neox", "minimax_m2", "mixtral", "muse_glimmer_text", "qwen3_moe", "solar_open", "stablelm"), ()
    ),
    "deepseek": ("linear",),
    "deepseek_v2": ("yarn",),
    "gpt_oss": ("yarn",),
    "internlm3": ("linear", "dynamic"),
    "nemotron": ("linear",),
}
"""How classes that do not know every scaling of rotary embeddings may have them scaled."""


def _why_not_loaded(model: ModelShape) -> str | None:
    """What mlx-lm's class of the family does not have, in words (models/*.py, run with each setting)."""
    name, moe, with_experts = model.architecture, model.moe, model.moe.layer_freq if model.moe else ()
    windows = model.windows
    turning = [model.has_rope(layer) for layer in range(model.num_layers)]
    all_but_fourth = [number % 4 != 0 for number in range(1, model.num_layers + 1)]
    scaling = model.rope_scaling or {}
    kind, factor = scaling.get("rope_type"), scaling.get("attention_factor")
    divided = model.logits_scaling != 1
    found = {
        "a head of its own": name in _ALWAYS_TIED and model.untied_embeddings,
        "its embedding as the head": name in _NEVER_TIED and model.tied_embeddings,
        "its embedding as a head whose logits are divided": name == "minicpm3" and model.tied_embeddings and divided,
        "blocks that are added as they are": name == "minicpm3" and model.residual_multiplier == 1,
        "layers without experts": name in ("mellum", "qwen2_moe") and not all(with_experts),
        "layers without experts behind others": name in DENSE_FIRST and with_experts != tuple(sorted(with_experts)),
        "groups of experts": name == "deepseek" and moe is not None and moe.num_groups is not None,
        "experts' weights that are multiplied": name == "deepseek" and moe is not None and moe.topk_scaling_factor != 1,
        "experts' weights that are normalised": name == "qwen2_moe" and moe is not None and not moe.pre_softmax,
        "one expert for each token": moe is not None and moe.topk == 1 and name in _ONE_EXPERT_AS_IT_IS,
        "rotary embeddings that are not scaled": name in ("deepseek_v2", "minicpm3") and not scaling,
        f"rotary embeddings scaled as {shown(kind)}": bool(scaling) and kind not in _SCALINGS.get(name, (kind,)),
        # which mlx-lm makes of the other settings, whatever it is
        "an attention_factor of YaRN": kind == "yarn"
        and factor is not None
        and not isclose(factor, yarn_mscale(scaling["factor"], 1.0), rel_tol=1e-6),
        "layers that share an indexer": model.dsa is not None and not all(model.dsa.layers),
        "keys of each head": name == "gpt_bigcode" and model.num_query_groups > 1,
        "gates of single channels": name == "laguna" and model.linear_gate == "softplus per element",
        "heads of this size": name in _HEADS_MAKE_WIDTH and model.projection_size != model.hidden_size,
        "biases of attention": name in _WITHOUT_BIASES and (model.qkv_bias or model.proj_bias),
        "no biases": name in ("gpt_neox", "phimoe", "starcoder2") and not model.qkv_bias,
        "an MLP of this width": name in _FOUR_TIMES and model.ffn_hidden_size != 4 * model.hidden_size,
        "scores or logits without a cap": name == "gemma2"
        and not (model.attn_logit_softcapping and model.final_logit_softcapping),
        "a cap of logits": name == "gemma3_text" and model.final_logit_softcapping is not None,
        "windows in all layers": name in ("gemma3n_text", "smollm3") and all(windows),
        "windows in no layer": name in ("gemma3n_text", "gpt_oss", "olmo3") and not any(windows),
        "layers without keys and values of their own": name in UNUSED_KEPT
        and model.num_kv_shared_layers > 0
        and not model.stores_unused,
        "a window, and no layer that has it": name in ("exaone4", "exaone_moe")
        and not any(windows)
        and model.rope_layers is not None,
        "windows in these layers": name in WINDOWS_BUT_EACH and each_without(windows) is None,
        "delta nets in these layers": name in DELTA_NETS_BUT_EACH
        and model.gdn is not None
        and each_without(model.gdn.layers) is None,
        "experts in these layers": (name == "llama4_text" and each_with_experts(model) is None)
        or (name == "jamba" and moe is not None and places_of_experts(model) is None),
        "several experts for each token": name == "llama4_text" and moe is not None and moe.topk > 1,
        "rotary embeddings in these layers": name == "llama4_text" and turning != all_but_fourth,
        "chunks of attention in these layers": name == "llama4_text" and windows != all_but_fourth,
        "queries that are not scaled": name in ("ministral3", "mistral4") and model.query_scaling_beta is None,
        "rotary embeddings scaled without an alpha": name == "hunyuan_v1_dense"
        and bool(scaling)
        and "alpha" not in scaling,
    }
    return next((why for why, there in found.items() if there), None)


def other_words(config: Mapping[str, Any], model: ModelShape) -> dict[str, tuple[object, object]]:
    """Keys of a config.json that mlx-lm goes by and transformers does not, of other values than the model's: what they
    are, and what they should be."""
    text = text_part(config)
    said = text if isinstance(text, Mapping) else config
    words = words_of_mlx(model, DType.bfloat16) | {"tie_word_embeddings": model.tied_embeddings}
    keys = sorted(words.keys() - {"dtype", "torch_dtype"})
    return {key: (said[key], words[key]) for key in keys if said.get(key, words[key]) not in (None, words[key])}


def computed_otherwise(model: ModelShape) -> Iterator[str]:
    """What mlx-lm 0.32 computes otherwise than transformers, whoever made the directory, in words."""
    name, scaling = model.architecture, model.rope_scaling or {}
    window = model.sliding_window if any(map(model.in_window, range(model.num_layers))) else None
    if window and window < model.max_position_embeddings and name in _WITHOUT_WINDOWS:
        yield f"attention has no window, so texts of more than {window} tokens are computed as if there were none"
    if name == "glm" and model.rotary_percent != 1:
        yield "all channels of heads are turned"
    if name == "jamba" and model.moe:
        yield "the weights of experts are a softmax over those chosen alone"
    if name in ("mamba2", "granitemoehybrid") and model.mamba and model.mamba.num_groups > 1:
        yield "the output of a mixer is normalised over all groups"
    if name in ("mamba", "falcon_mamba") and model.norm_epsilon != 1e-5:
        yield "norms have an epsilon of 1e-5, whatever config.json says"
    if name in _FOUR_TIMES and model.activation == "gelu":
        yield "GELU is approximated by tanh"
    if name == "phi3" and scaling:
        yield "rotary embeddings are those of long texts for short ones too"
    if name == "gpt_oss" and scaling.get("truncate") is False:
        yield "the bounds between which YaRN blends frequencies are rounded"
    if name == "gpt_oss" and model.activation_clamp != 7:
        yield "activations are clamped at 7, whatever config.json says"
    if name == "olmo3" and model.rotary_base_local not in (None, model.rotary_base):
        yield "layers with windows turn by the base of the others"
