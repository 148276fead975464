"""Ling 2.0 (Ling and Ring: mini, flash and 1T): Sarvam 30B under the same names, with a part of each head turned,
groups of experts and layers of multi-token prediction.

transformers has no class of it. Keys and defaults are those of the published code (configuration_bailing_moe_v2.py,
modeling_bailing_moe_v2.py), which Megatron-Bridge has, too.

Traps: layers of prediction are behind those that `num_hidden_layers` counts. Whole heads turn where no key says a part.
Published files call it `bailing_moe`, which Ling 1 is called, too: its class tells them apart.
"""

from precisionctl.architectures.config_keys import SILU, SIZES, Config, Fields, Key, Only, Rule, heads, tied
from precisionctl.architectures.param_map import Alias, Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.deepseek_keys import groups
from precisionctl.architectures.shared.deepseek_rows import prediction
from precisionctl.architectures.shared.llama_rows import ATTENTION_NORM, FINAL_NORM, MLP, MLP_NORM, OUTPUT
from precisionctl.architectures.shared.moe_rows import MOE_NORM, NUMBERED, ROUTER, SHARED_EXPERTS
from precisionctl.architectures.tables.sarvam_moe import (
    PUBLISHED_ATTENTION,
    PUBLISHED_BIAS,
    PUBLISHED_EMBEDDING,
    ROUTING_KEYS,
)
from precisionctl.errors import UnknownArchitecture, shown

_CLASS = "BailingMoeV2ForCausalLM"


def _check_class(config: Config) -> Fields:
    if config.get("model_type") == "bailing_moe" and config.get("architectures") != [_CLASS]:
        what = f"architectures is {shown(config.get('architectures'))}: of `bailing_moe` only Ling 2.0 is known here"
        raise UnknownArchitecture(what)
    return {}


ARCHITECTURE = Architecture(
    model_types=dict.fromkeys(("bailing_moe_v2", "bailing_moe"), _CLASS),
    rows=(
        *PUBLISHED_EMBEDDING,
        *ATTENTION_NORM,
        *PUBLISHED_ATTENTION,
        *MLP_NORM,
        *MLP,
        *MOE_NORM,
        *ROUTER,
        *PUBLISHED_BIAS,
        *SHARED_EXPERTS,
        *NUMBERED,
        *FINAL_NORM,
        *OUTPUT,
        *prediction(
            (*ATTENTION_NORM, *PUBLISHED_ATTENTION),
            (*ROUTER, *PUBLISHED_BIAS, *SHARED_EXPERTS),
            last_norm="final_layernorm",
            experts=NUMBERED,
        ),
    ),
    config=(
        Rule(("architectures",), _check_class),
        *SIZES,
        heads(num_key_value_heads=4, head_dim=128),
        SILU,
        Key("qkv_bias", "use_qkv_bias", False),
        Only("use_bias", False),
        Key("qk_layernorm", "use_qk_norm", True),
        *ROUTING_KEYS,
        groups(8, 4),
        Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.0),
        Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(6e5, partial=True),
        Key("mtp_num_layers", "num_nextn_predict_layers", 0),
        tied(False),
        Rule((), lambda config: {}, lambda model: {"embedding_dropout": 0.0, "router_dtype": "fp32"}),
    ),
    aliases=(Alias("lm_head.weight", of="model.word_embeddings.weight", switch="tied_embeddings"),),
)
