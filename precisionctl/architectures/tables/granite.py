"""Granite 3 and 4: Llama with multipliers of embedding, attention's logits, what is added to the residual, and logits.

Trap: `attention_multiplier` stands in place of the root of a head's size, and logits are divided by `logits_scaling`.
"""

from precisionctl.architectures.config_keys import (
    ATTENTION_BIAS,
    HEADS,
    SILU,
    SIZES,
    Config,
    Entry,
    Fields,
    Key,
    Rule,
    tied,
)
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA
from precisionctl.model.model_parts import real
from precisionctl.model.model_shape import ModelShape


def _read_scales(config: Config) -> Fields:
    keys = ("attention_multiplier", "logits_scaling")
    attention, logits = (real(1.0 if config.get(key) is None else config[key], key) for key in keys)
    return {"query_pre_attn_scalar": attention**-2, "logits_scaling": logits}


def _write_scales(model: ModelShape) -> Config:
    attention = model.query_pre_attn_scalar or model.kv_channels
    return {"attention_multiplier": attention**-0.5, "logits_scaling": model.logits_scaling}


MULTIPLIERS: tuple[Entry, ...] = (
    Key("embedding_multiplier", "embedding_multiplier", 1.0),
    Key("residual_multiplier", "residual_multiplier", 1.0),
    Rule(("attention_multiplier", "logits_scaling"), _read_scales, _write_scales),
)
OF_ALL_GRANITES: tuple[Entry, ...] = (*SIZES, ATTENTION_BIAS, SILU, *MULTIPLIERS)
COMMON: tuple[Entry, ...] = (
    *OF_ALL_GRANITES,
    HEADS,
    Key("norm_epsilon", "rms_norm_eps", 1e-6),
    rope(),
    tied(False),
)

ARCHITECTURE = Architecture(
    model_types={"granite": "GraniteForCausalLM"},
    rows=LLAMA.rows,
    config=(*COMMON, Key("mlp_bias", "mlp_bias", False)),
)
