"""Which models mlx-lm loads, and what it computes otherwise than transformers."""

from collections.abc import Iterator

from precisionctl.checkpoints.mlx_config import DENSE_FIRST
from precisionctl.checkpoints.mlx_names import RENAMED
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model_shape import ModelShape
from precisionctl.untabled_model import UntabledModel


def check_loaded(model: ModelShape) -> None:
    """Raise UnknownArchitecture for a model that mlx-lm does not load as it is, or was not seen to."""
    name = model.model_type
    if isinstance(model, UntabledModel) or model.wrapper or name not in RENAMED:
        what = f"what mlx-lm stores of a {shown(name)} is not known here"
    elif why := _why_not_loaded(model):
        what = f"mlx-lm has no {name} with {why}, as this model has"
    else:
        return
    raise UnknownArchitecture(
        what, do="--target llama.cpp may have it. docs/mlx.md names the families that are written."
    )


_ALWAYS_TIED = ("cohere", "cohere2", "gemma", "gemma2", "lfm2", "lfm2_moe")
_NEVER_TIED = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss"),
    *("kimi_k2", "nemotron_h", "phi", "phimoe", "qwen2_moe", "solar_open", "stablelm"),
)


def _why_not_loaded(model: ModelShape) -> str | None:
    """What mlx-lm's class of the family does not have, in words (models/*.py)."""
    name, with_experts = model.model_type, model.moe.layer_freq if model.moe else ()
    found = {
        "a head of its own": name in _ALWAYS_TIED and model.untied_embeddings,
        "its embedding as the head": name in _NEVER_TIED and model.tied_embeddings,
        "layers without experts": name in ("mellum", "qwen2_moe") and not all(with_experts),
        "layers without experts behind others": name in DENSE_FIRST and with_experts != tuple(sorted(with_experts)),
        "rotary embeddings that are not scaled": name in ("deepseek_v2", "minicpm3") and not model.rope_scaling,
        "layers that share an indexer": bool(model.dsa) and not all(model.dsa.layers if model.dsa else ()),
        "keys of each head": name == "gpt_bigcode" and model.num_query_groups > 1,
        "gates of single channels": name == "laguna" and model.linear_gate == "softplus per element",
        "heads of this size": name in ("helium", "internlm3") and model.projection_size != model.hidden_size,
    }
    return next((why for why, there in found.items() if there), None)


def computed_otherwise(model: ModelShape) -> Iterator[str]:
    """What mlx-lm 0.32 computes otherwise than transformers, whoever made the directory, in words."""
    name, scaling = model.model_type, model.rope_scaling or {}
    if name == "glm" and model.rotary_percent != 1:
        yield "all channels of heads are turned"
    if name == "jamba" and model.moe:
        yield "the weights of experts are a softmax over those chosen alone"
    if name in ("mamba2", "granitemoehybrid") and model.mamba and model.mamba.num_groups > 1:
        yield "the output of a mixer is normalised over all groups"
    if name == "phi3" and scaling:
        yield "rotary embeddings are those of long texts for short ones too"
    if name == "gpt_oss" and scaling.get("truncate") is False:
        yield "the bounds between which YaRN blends frequencies are rounded"
    if name == "gpt_oss" and model.activation_clamp != 7:
        yield "activations are clamped at 7, whatever config.json says"
    if name == "olmo3" and model.rotary_base_local not in (None, model.rotary_base):
        yield "layers with windows turn by the base of the others"
