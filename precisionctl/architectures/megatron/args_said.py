"""How Megatron's arguments are read: what must be there, what has few known values, and lists of layers."""

from collections.abc import Mapping
from typing import Any

from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown

_SWITCHES = (
    *("group_query_attention", "multi_latent_attention", "add_bias_linear", "add_qkv_bias", "attention_output_gate"),
    *("layernorm_zero_centered_gamma", "apply_layernorm_1p", "qk_layernorm", "qk_l2_norm", "rotary_interleaved"),
    *("untie_embeddings_and_output_weights", "use_rope_scaling", "yarn_correction_range_round_to_int"),
    *("swiglu", "gated_linear_unit", "quick_geglu", "squared_relu", "bias_gelu_fusion", "is_hybrid_model"),
    *("moe_router_pre_softmax", "moe_router_enable_expert_bias", "moe_shared_expert_gate", "moe_apply_probs_on_input"),
    *("enable_hyper_connections", "dsa_indexer_rope_interleaved", "kda_safe_gate"),
)
_COUNTS = (
    *("mtp_num_layers", "num_experts", "moe_n_hash_layers", "moe_latent_size", "kv_channels", "vocab_size"),
    *("dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset", "kda_f_lora_rank", "kda_gate_lora_rank"),
)
_NUMBERS = (
    *("glu_linear_offset", "moe_router_topk_scaling_factor", "activation_func_clamp_value", "softmax_scale"),
    *("rotary_seq_len_interpolation_factor", "kda_lower_bound"),
)


def check_kinds(args: Mapping[str, Any]) -> None:
    """Raise DamagedCheckpoint for a switch, count or number that is something else, whose truth in Python says nothing:
    an empty list would be as if it were not there. None is that."""
    kinds = (
        (_SWITCHES, (bool, int), "true or false"),
        (_COUNTS, (int,), "a whole number"),
        (_NUMBERS, (int, float), "a number"),
    )
    for names, types, words in kinds:
        for name in names:
            value = args.get(name)
            if value is not None and (type(value) not in types or (names is _SWITCHES and value not in (0, 1))):
                raise DamagedCheckpoint(f"{name} is {shown(value)}, not {words}")


TRUST_REFERENCE = (
    "`convert SRC OUT --to megatron --reference HF_DIR --trust-reference` goes by HF_DIR's config.json, and writes the "
    "arguments anew."
)
"""What to do about arguments that a run was not trained by, or that no family here has."""


def needed(args: Mapping[str, Any], name: str) -> Any:
    """An argument that every run has. Raises DamagedCheckpoint where it is not there."""
    if name not in args:
        do = "Is the file whole? `convert` with --reference and --trust-reference takes it from a config.json."
        raise DamagedCheckpoint(f"no `{name}` among Megatron's arguments", do=do)
    return args[name]


def one_of(args: Mapping[str, Any], name: str, known: tuple[object, ...], default: object) -> Any:
    """An argument that has one of the `known` values. Raises UnknownArchitecture for another."""
    value = args.get(name, default)
    if value not in known:
        raise UnknownArchitecture(f"no family known here has Megatron's {name}={shown(value)}")
    return value


def norm_epsilon(args: Mapping[str, Any]) -> Any:
    """The epsilon of norms, under its name since megatron-core 0.16 or the older one."""
    return args["layernorm_epsilon"] if "layernorm_epsilon" in args else needed(args, "norm_epsilon")


def entries(listed: Any) -> tuple[bool, ...]:
    """A list with an entry for each layer, and no word, whose letters could be as many. Raises DamagedCheckpoint."""
    if not isinstance(listed, list | tuple):
        raise DamagedCheckpoint(f"{shown(listed)} where a list has an entry for each layer")
    return tuple(bool(each) for each in listed)


def all_but_every(frequency: Any, num_layers: int) -> tuple[bool, ...]:
    """`N`: all layers but every N-th; a list: 1 where it is one."""
    if isinstance(frequency, int):
        return tuple(layer % frequency != 0 for layer in range(1, num_layers + 1))
    return entries(frequency)
