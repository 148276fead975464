"""Granite 3 and 4: Llama with multipliers of embedding, attention's logits, what is added to the residual, and logits.

Trap: `attention_multiplier` stands in place of the root of a head's size, and logits are divided by `logits_scaling`.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA
from precisionctl.model.model_parts import real


def _read_scales(config: keys.Config) -> keys.Fields:
    both = ("attention_multiplier", "logits_scaling")
    attention, logits = (real(1.0 if config.get(key) is None else config[key], key) for key in both)
    return {"query_pre_attn_scalar": attention**-2, "logits_scaling": logits}


MULTIPLIERS: tuple[keys.Entry, ...] = (
    keys.Key("embedding_multiplier", "embedding_multiplier", 1.0),
    keys.Key("residual_multiplier", "residual_multiplier", 1.0),
    keys.Rule(
        ("attention_multiplier", "logits_scaling"),
        _read_scales,
        lambda model: {
            "attention_multiplier": (model.query_pre_attn_scalar or model.kv_channels) ** -0.5,
            "logits_scaling": model.logits_scaling,
        },
    ),
)
OF_ALL_GRANITES: tuple[keys.Entry, ...] = (*keys.SIZES, keys.ATTENTION_BIAS, keys.SILU, *MULTIPLIERS)
COMMON: tuple[keys.Entry, ...] = (
    *OF_ALL_GRANITES,
    keys.HEADS,
    keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
    rope(),
    keys.tied(False),
)

ARCHITECTURE = Architecture(
    model_types={"granite": "GraniteForCausalLM"},
    rows=LLAMA.rows,
    config=(*COMMON, keys.Key("mlp_bias", "mlp_bias", False)),
)
