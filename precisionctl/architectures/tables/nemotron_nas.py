"""Llama-Nemotron Super and Ultra (DeciLM): a Llama, of whose layers a neural architecture search left attention, the
MLP or both out, and made MLPs of many widths. Names in Megatron are those of Megatron-Core's heterogeneous layers
(megatron/core/models/gpt/heterogeneous/), as Megatron-Bridge maps them (llama_nemotron_bridge.py).

Traps: config.json says `null` for intermediate_size and num_key_value_heads, and an MLP's width as a multiple of the
hidden size, which is rounded; a layer without attention or MLP has no norm for it either; the 51B's search also put
single linears in the place of attention, which no table has.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, only_in
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import block_configs, llama_rows as llama
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown

_UNSAID = ("intermediate_size", "num_key_value_heads")


def _read_sizes(config: keys.Config) -> keys.Fields:
    for key in _UNSAID:  # which published code sets to null, whatever is said
        if config.get(key) is not None:
            raise UnknownArchitecture(f"{key}={shown(config[key])} beside {block_configs.KEY}, which say it by layer")
    heads = keys.HEADS.read(config)
    hidden = keys.size(config, "hidden_size")
    blocks = block_configs.read_blocks(config.get(block_configs.KEY), heads["num_attention_heads"], hidden)
    found, layers = len(blocks.num_query_groups), keys.size(config, "num_hidden_layers")
    if found != layers:
        raise DamagedCheckpoint(f"{block_configs.KEY} has {found} blocks for {layers} layers")
    return {**heads, **{f"heterogeneous.{name}": sizes for name, sizes in vars(blocks).items()}, **blocks.largest}


ARCHITECTURE = Architecture(
    model_types={"nemotron-nas": "DeciLMForCausalLM"},
    behind={"input_layernorm": "ln_1", "post_attention_layernorm": "self_attn"},
    rows=llama.model_rows(
        *only_in("attention", (*llama.ATTENTION_NORM, *llama.ATTENTION)), *llama.MLP_NORM, *llama.MLP
    ),
    config=(
        *keys.SIZES_BESIDE_MLP,
        keys.Rule(
            (*_UNSAID, block_configs.KEY, "num_attention_heads", "head_dim"),
            _read_sizes,
            lambda model: {
                **keys.HEADS.write(model),
                **dict.fromkeys(_UNSAID),
                block_configs.KEY: block_configs.write_blocks(model),
            },
        ),
        keys.ATTENTION_BIAS,
        keys.SILU,
        keys.Key("mlp_bias", "mlp_bias", False),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(),
        keys.tied(False),
    ),
)
