"""Ling 2.0 (Ling and Ring: mini, flash and 1T): Sarvam 30B under the same names, with a part of each head turned,
groups of experts and layers of multi-token prediction.

transformers has no class of it. Keys and defaults are those of the published code (configuration_bailing_moe_v2.py,
modeling_bailing_moe_v2.py), which Megatron-Bridge has, too.

Traps: layers of prediction are behind those that `num_hidden_layers` counts. Whole heads turn where no key says a part.
Published files call it `bailing_moe`, which Ling 1 is called, too: its class tells them apart.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Alias, Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, llama_rows as llama, moe_rows as moe
from precisionctl.architectures.tables.sarvam_moe import (
    PUBLISHED_ATTENTION,
    PUBLISHED_BIAS,
    PUBLISHED_EMBEDDING,
    ROUTING_KEYS,
)
from precisionctl.errors import UnknownArchitecture, shown

_CLASS = "BailingMoeV2ForCausalLM"


def _check_class(config: keys.Config) -> keys.Fields:
    if config.get("model_type") == "bailing_moe" and config.get("architectures") != [_CLASS]:
        what = f"architectures is {shown(config.get('architectures'))}: of `bailing_moe` only Ling 2.0 is known here"
        raise UnknownArchitecture(what)
    return {}


ARCHITECTURE = Architecture(
    model_types=dict.fromkeys(("bailing_moe_v2", "bailing_moe"), _CLASS),
    rows=(
        *PUBLISHED_EMBEDDING,
        *llama.ATTENTION_NORM,
        *PUBLISHED_ATTENTION,
        *llama.MLP_NORM,
        *llama.MLP,
        *moe.MOE_NORM,
        *moe.ROUTER,
        *PUBLISHED_BIAS,
        *moe.SHARED_EXPERTS,
        *moe.NUMBERED,
        *llama.FINAL_NORM,
        *llama.OUTPUT,
        *deepseek_rows.prediction(
            (*llama.ATTENTION_NORM, *PUBLISHED_ATTENTION),
            (*moe.ROUTER, *PUBLISHED_BIAS, *moe.SHARED_EXPERTS),
            last_norm="final_layernorm",
            experts=moe.NUMBERED,
        ),
    ),
    config=(
        keys.Rule(("architectures",), _check_class),
        *keys.SIZES,
        keys.heads(num_key_value_heads=4, head_dim=128),
        keys.SILU,
        keys.Key("qkv_bias", "use_qkv_bias", False),
        keys.only("use_bias", False),
        keys.Key("qk_layernorm", "use_qk_norm", True),
        *ROUTING_KEYS,
        deepseek_keys.groups(8, 4),
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.0),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(6e5, partial=True),
        keys.Key("mtp_num_layers", "num_nextn_predict_layers", 0),
        keys.tied(False),
        keys.Rule((), write=lambda model: {"embedding_dropout": 0.0, "router_dtype": "fp32"}),
    ),
    aliases=(Alias("lm_head.weight", of="model.word_embeddings.weight", switch="tied_embeddings"),),
)
