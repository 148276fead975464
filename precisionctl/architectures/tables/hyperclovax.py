"""HyperCLOVA X: Granite with a norm after each block, too.

Traps: logits are multiplied by `logits_scaling`, where Granite divides; `attention_multiplier` is the root of a head's
size if it is not said.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, only_with, renamed
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.model.model_parts import real

_NORMS_AFTER = only_with(
    "post_layernorms",
    renamed(
        (*llama.POST_ATTENTION_NORM, *llama.POST_MLP_NORM),
        {"post_attention_layernorm": "post_norm1", "post_feedforward_layernorm": "post_norm2"},
    ),
)


def _read_attention(config: keys.Config) -> keys.Fields:
    said, usual = config.get("attention_multiplier"), keys.HEADS.read(config)["kv_channels"]
    if said is None or said == usual**-0.5:  # whose square is not 1 / 128 to the last bit
        return {"query_pre_attn_scalar": usual}
    return {"query_pre_attn_scalar": real(said, "attention_multiplier") ** -2}


ARCHITECTURE = Architecture(
    model_types={"hyperclovax": "HyperCLOVAXForCausalLM"},
    rows=llama.model_rows(*llama.ATTENTION_NORM, *llama.ATTENTION, *llama.MLP_NORM, *llama.MLP, *_NORMS_AFTER),
    config=llama_keys(
        keys.Key("mlp_bias", "mlp_bias", False),
        keys.Key("embedding_multiplier", "embedding_multiplier", 1.0),
        keys.Key("residual_multiplier", "residual_multiplier", 1.0),
        keys.Key("logit_multiplier", "logits_scaling", 1.0),
        keys.Rule(
            ("attention_multiplier",),
            _read_attention,
            lambda model: {"attention_multiplier": (model.query_pre_attn_scalar or model.kv_channels) ** -0.5},
        ),
        keys.Key("post_layernorms", "use_post_norm", True),
        attention_bias=True,
    ),
    names_by="this project",
)
