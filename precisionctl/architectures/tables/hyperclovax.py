"""HyperCLOVA X: Granite with a norm after each block, too.

Traps: logits are multiplied by `logits_scaling`, where Granite divides; `attention_multiplier` is the root of a head's
size if it is not said.
"""

from precisionctl.architectures.config_keys import ATTENTION_BIAS, HEADS, SILU, SIZES, Config, Fields, Key, Rule, tied
from precisionctl.architectures.param_map import Architecture, only_with, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.gemma_rows import POST_ATTENTION_NORM, POST_MLP_NORM
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION,
    ATTENTION_NORM,
    MLP,
    MLP_NORM,
    model_rows,
)
from precisionctl.model.model_parts import real
from precisionctl.model.model_shape import ModelShape

_NORMS_AFTER = only_with(
    "post_layernorms",
    renamed(
        (*POST_ATTENTION_NORM, *POST_MLP_NORM),
        {"post_attention_layernorm": "post_norm1", "post_feedforward_layernorm": "post_norm2"},
    ),
)


def _read_attention(config: Config) -> Fields:
    said, usual = config.get("attention_multiplier"), HEADS.read(config)["kv_channels"]
    if said is None or said == usual**-0.5:  # whose square is not 1 / 128 to the last bit
        return {"query_pre_attn_scalar": usual}
    return {"query_pre_attn_scalar": real(said, "attention_multiplier") ** -2}


def _write_attention(model: ModelShape) -> Config:
    return {"attention_multiplier": (model.query_pre_attn_scalar or model.kv_channels) ** -0.5}


ARCHITECTURE = Architecture(
    model_types={"hyperclovax": "HyperCLOVAXForCausalLM"},
    rows=model_rows(*ATTENTION_NORM, *ATTENTION, *MLP_NORM, *MLP, *_NORMS_AFTER),
    config=(
        *SIZES,
        HEADS,
        ATTENTION_BIAS,
        SILU,
        Key("mlp_bias", "mlp_bias", False),
        Key("embedding_multiplier", "embedding_multiplier", 1.0),
        Key("residual_multiplier", "residual_multiplier", 1.0),
        Key("logit_multiplier", "logits_scaling", 1.0),
        Rule(("attention_multiplier",), _read_attention, _write_attention),
        Key("post_layernorms", "use_post_norm", True),
        Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(),
        tied(False),
    ),
    names_by="this project",
)
