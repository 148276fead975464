"""Lara 4 Mini (Translated): gated delta nets in two layers of five, windows with rotary embeddings in two, attention to
all without positions in one; experts in every layer, and a shared one without a gate.

Traps: files have the input projection of a delta net as one tensor, in Megatron's order, and its norm under Megatron's
name; transformers has four in memory. Queries make no output gate, and no norm is zero-centred, unlike Qwen3-Next's.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import listed_layers, window_fields, write_window
from precisionctl.architectures.param_map import Architecture, Either, renamed
from precisionctl.architectures.rearrangements import BY_KIND, SAME
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.delta_net_rows import delta_net
from precisionctl.architectures.shared.moe_keys import scores

_IN_MEMORY = delta_net(
    BY_KIND, *(f"in_proj_{part}" for part in ("qkv", "z", "b", "a")), values=("in_proj_b", "in_proj_a")
)
_PUBLISHED = renamed(delta_net(SAME, "in_proj", values=("in_proj",)), {".linear_attn.norm.": ".linear_attn.out_norm."})
_APART = tuple(row for row in _PUBLISHED if row not in _IN_MEMORY)
_DELTA_NET = Either(_APART, in_memory=tuple(row for row in _IN_MEMORY if row not in _PUBLISHED))

_PATTERN = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")
_DELTA_NETS, _WINDOWS = (
    {kind: kind == this for kind in _PATTERN} for this in ("linear_attention", "sliding_attention")
)


def _read_layers(config: keys.Config) -> keys.Fields:
    number = keys.layers(config)
    unlisted = [_PATTERN[layer % len(_PATTERN)] for layer in range(number)]
    said = {"layer_types": unlisted} | {key: value for key, value in config.items() if value is not None}
    nets, windows = (listed_layers(said, kinds) or [] for kinds in (_DELTA_NETS, _WINDOWS))
    fields = window_fields(config, windows, 512)
    return {**fields, "gdn.layers": tuple(nets), "rope_layers": tuple(windows)}


ARCHITECTURE = Architecture(
    model_types={"lara_mini": "LaraMiniForCausalLM"},
    behind={"gate": "experts"},
    rows=llama.model_rows(
        *(row for row in _PUBLISHED if row not in _APART),
        _DELTA_NET,
        *moe.MOE_NORM,
        *moe.ROUTER,
        *moe.SHARED_EXPERT,
        *moe.FUSED_EXPERTS,
    ),
    config=(
        *keys.SIZES_BESIDE_MLP,
        keys.heads(num_key_value_heads=4, head_dim=128),
        keys.ATTENTION_BIAS,
        keys.SILU,
        keys.always("qk_layernorm", True),
        keys.Rule(("layer_types", "sliding_window"), _read_layers, write_window),
        keys.Key("gdn.num_key_heads", "linear_num_key_heads", 8),
        keys.Key("gdn.num_value_heads", "linear_num_value_heads", 16),
        keys.Key("gdn.key_head_dim", "linear_key_head_dim", 128),
        keys.Key("gdn.value_head_dim", "linear_value_head_dim", 128),
        keys.Key("gdn.conv_kernel_dim", "linear_conv_kernel_dim", 4),
        keys.Key("ffn_hidden_size", "moe_intermediate_size", 512),  # of no layer
        keys.EVERY_LAYER_SPARSE,
        keys.Key("moe.num_experts", "num_experts", 128),
        keys.Key("moe.topk", "num_experts_per_tok", 4),
        keys.Key("moe.ffn_hidden_size", "moe_intermediate_size", 512),
        keys.Key("moe.shared_ffn_hidden_size", "shared_expert_intermediate_size", 512),
        scores(True),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(),
        keys.tied(True),
    ),
)
