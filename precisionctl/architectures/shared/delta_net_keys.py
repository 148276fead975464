"""config.json's keys of models with a gated delta net beside attention, which Qwen3-Next and Qwen3.5 have in common."""

from collections.abc import Mapping

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import all_but_every, layers_of, write_layer_types
from precisionctl.architectures.rope import rope

KINDS = {"linear_attention": True, "full_attention": False}
"""Of layers: has one a delta net?"""

_INTERVAL = "full_attention_interval"
_UNLISTED = all_but_every(4, _INTERVAL)


def delta_net_layers(kinds: Mapping[str, bool]) -> keys.Rule:
    """Which layers have a delta net, by these kinds."""

    def read(config: keys.Config) -> keys.Fields:
        return {"gdn.layers": tuple(layers_of(kinds, config, _UNLISTED))}

    return keys.Rule(("layer_types", _INTERVAL), read, write_layer_types)


BESIDE_LAYERS: tuple[keys.Entry, ...] = (
    keys.ATTENTION_BIAS,
    keys.SILU,
    keys.always("qk_layernorm", True),
    keys.always("attention_output_gate", True),
    keys.always("zero_centered_gamma", True),
    keys.always("hf_zero_centered_gamma", True),
    keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
    keys.Key("gdn.num_key_heads", "linear_num_key_heads", 16),
    keys.Key("gdn.num_value_heads", "linear_num_value_heads", 32),
    keys.Key("gdn.key_head_dim", "linear_key_head_dim", 128),
    keys.Key("gdn.value_head_dim", "linear_value_head_dim", 128),
    keys.Key("gdn.conv_kernel_dim", "linear_conv_kernel_dim", 4),
    keys.tied(False),
)

COMMON: tuple[keys.Entry, ...] = (*BESIDE_LAYERS, delta_net_layers(KINDS), rope(percent=0.25, partial=True))


def prediction_layers(key: str) -> keys.Rule:
    """How many layers of multi-token prediction there are: one, or none. Published files have one, which config.json
    may not mention and transformers does not save. So the tensors show whether there is one."""

    def read(config: keys.Config) -> keys.Fields:
        return {"mtp_num_layers": keys.one_or_none(config, key, absent=1)}

    return keys.Rule((key,), read, lambda model: {} if model.mtp_num_layers == 1 else {key: model.mtp_num_layers})
