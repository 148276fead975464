"""EXAONE 3.0 and 3.5: a Llama under GPT-2's names.

Trap: published files have other words than transformers for three keys of config.json; its class reads both and writes
its own, and engines look for the published ones.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import TIED, Alias, Architecture, Either, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama

_BODY = (*llama.EMBEDDING, *llama.ATTENTION_NORM, *llama.ATTENTION, *llama.MLP_NORM, *llama.MLP, *llama.FINAL_NORM)
PUBLISHED = {
    "model.embed_tokens.": "transformer.wte.",
    "model.layers.": "transformer.h.",
    "model.norm.": "transformer.ln_f.",
    ".input_layernorm.": ".ln_1.",
    ".self_attn.": ".attn.attention.",
    ".o_proj.": ".out_proj.",
    ".post_attention_layernorm.": ".ln_2.",
    ".gate_proj.": ".c_fc_0.",
    ".up_proj.": ".c_fc_1.",
    ".down_proj.": ".c_proj.",
}
"""Parts of names of published files, by those that transformers has in memory."""
_WORDS = {
    "num_hidden_layers": "num_layers",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}

ARCHITECTURE = Architecture(
    model_types={"exaone": "ExaoneForCausalLM"},
    rows=(Either(renamed(_BODY, PUBLISHED), in_memory=_BODY), *llama.OUTPUT),
    config=(
        *keys.reworded(
            (*keys.SIZES, keys.SILU, keys.Key("norm_epsilon", "rms_norm_eps", 1e-5)), _WORDS, published=True
        ),
        keys.TWO_CLASSES,
        keys.heads(num_key_value_heads=8),
        keys.ATTENTION_BIAS,
        keys.Key("mlp_bias", "mlp_bias", False),
        rope(500000.0),
        keys.tied(False),
    ),
    aliases=(Alias("lm_head.weight", of="transformer.wte.weight", switch="tied_embeddings"), TIED),
)
