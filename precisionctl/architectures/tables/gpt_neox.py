"""GPT-NeoX and Pythia.

Traps: attention and MLP have norms of their own but are added together, or one after the other (RedPajama-INCITE);
`query_key_value` is q, k, v by head, as in Megatron.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, Either, renamed
from precisionctl.architectures.rope import KEYS, read_rope, rotary_parameters
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.tables.gpt2 import body

NAMES = {
    "model.embed_tokens": "gpt_neox.embed_in",
    "model.layers.": "gpt_neox.layers.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.": ".attention.",
    ".up_proj.": ".dense_h_to_4h.",
    ".down_proj.": ".dense_4h_to_h.",
    "model.norm.": "gpt_neox.final_layer_norm.",
    "lm_head": "embed_out",
}


def _read_rope(config: keys.Config) -> keys.Fields:
    """transformers 4 has `rotary_emb_base` and `rotary_pct`, and no other word counts beside parameters."""
    older = {"rope_theta": config.get("rotary_emb_base"), "partial_rotary_factor": config.get("rotary_pct")}
    beside = {key: value for key, value in {**config, **older}.items() if value is not None}
    fields = read_rope(beside, rotary_parameters(beside, 10000.0, percent=0.25), 10000.0, 0.25)
    taken = {"rope_theta": fields["rotary_base"], "partial_rotary_factor": fields["rotary_percent"]}
    keys.check_passed_over(config, taken)
    return fields


ARCHITECTURE = Architecture(
    model_types={"gpt_neox": "GPTNeoXForCausalLM"},
    rows=(
        *renamed(body(llama.JOINED_QKV), NAMES),
        Either(renamed(llama.OUTPUT, NAMES), in_memory=llama.OUTPUT),
    ),
    config=(
        *keys.SIZES,
        keys.HEADS,
        keys.Rule(
            ("attention_bias",), keys.attention_bias(True).read, lambda model: {"attention_bias": model.qkv_bias}
        ),
        keys.activation("hidden_act", {"gelu": "gelu", **keys.GELU_TANH}, "gelu"),
        keys.always("gated_linear_unit", False),
        keys.always("normalization", "LayerNorm"),
        keys.Key("norm_epsilon", "layer_norm_eps", 1e-5),
        keys.Rule(
            (*KEYS, "rotary_emb_base", "rotary_pct"),
            _read_rope,
            lambda model: {
                "rotary_emb_base": model.rotary_base,
                "rotary_pct": model.rotary_percent,
                **({"rope_scaling": dict(model.rope_scaling)} if model.rope_scaling else {}),
            },
        ),
        keys.always("mlp_bias", True),
        keys.Key("parallel_residual", "use_parallel_residual", True),  # false: RedPajama-INCITE
        keys.tied(False),
    ),
    aliases=(),
    derived=(
        "gpt_neox.layers.{layer}.attention.bias",
        "gpt_neox.layers.{layer}.attention.masked_bias",
        "gpt_neox.layers.{layer}.attention.rotary_emb.inv_freq",
    ),
    names_by="this project",
)
