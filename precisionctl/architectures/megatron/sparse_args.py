"""Megatron's arguments that describe attention to chosen keys, both ways: the indexers of DeepSeek's sparse attention,
and, of Megatron-Core's dev branch, DeepSeek-V4's attention."""

from collections.abc import Mapping
from typing import Any

from precisionctl.architectures.megatron.args_said import needed, norm_epsilon, one_of
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_parts import real
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.sparse_parts import CSA, DSA

DSA_NAME = "dsa"
"""Of `experimental_attention_variant`."""
_DSA = {  # argument, field of DSA
    "dsa_indexer_n_heads": "n_heads",
    "dsa_indexer_head_dim": "head_dim",
    "dsa_indexer_topk": "topk",
    "dsa_indexer_rope_interleaved": "rope_interleaved",
}
INDEXER_NORM_EPSILON = 1e-6
"""Of the norm of an indexer's keys in transformers (modeling_deepseek_v32.py, modeling_glm_moe_dsa.py), whatever
config.json says."""
CSA_NAME = "dsv4_hybrid"
"""Of `experimental_attention_variant`."""
_CSA = {  # argument, field of CSA
    "csa_window_size": "window_size",
    "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "dsa_indexer_n_heads": "n_heads",
    "dsa_indexer_head_dim": "head_dim",
    "dsa_indexer_topk": "topk",
}


def dsa_args(model: ModelShape) -> dict[str, Any]:
    """Arguments of Megatron-Core 0.19; older versions know neither these nor the attention. One argument says this and
    that layers have delta nets, so beside those there are none."""
    if model.dsa is None or model.gdn:
        return {}
    every, after = _every_and_after(model.dsa.layers)
    return {
        "experimental_attention_variant": DSA_NAME,
        **{argument: getattr(model.dsa, field) for argument, field in _DSA.items()},
        "dsa_indexer_topk_freq": every,
        "dsa_indexer_skip_topk_offset": after,
        "dsa_indexer_k_norm_epsilon": INDEXER_NORM_EPSILON,
        "apply_rope_fusion": False,  # Megatron-Core asserts it
    }


def read_dsa(args: Mapping[str, Any], num_layers: int) -> DSA | None:
    """The inverse; None where there are none."""
    if args.get("experimental_attention_variant") != DSA_NAME:
        return None
    one_of(args, "dsa_indexer_scoring_relu", (True, None), True)
    for name in ("layernorm_zero_centered_gamma", "apply_layernorm_1p"):  # of the norm of an indexer's keys, too
        one_of(args, name, (False, None), False)
    every, after = args.get("dsa_indexer_topk_freq") or 1, args.get("dsa_indexer_skip_topk_offset") or 0
    found = {field: args[argument] for argument, field in _DSA.items() if args.get(argument) is not None}
    return DSA(layers=_indexed(num_layers, every, after), **found)


def indexer_norm_epsilon(args: Mapping[str, Any]) -> float | None:
    """The epsilon of the norm of an indexer's keys, which is the other norms' where no argument says it
    (megatron/core/transformer/experimental_attention_variant/dsa.py, DSAIndexer). None where the arguments are those of
    a model without indexers. Raises DamagedCheckpoint."""
    if args.get("experimental_attention_variant") != DSA_NAME:
        return None
    said = args.get("dsa_indexer_k_norm_epsilon")
    return norm_epsilon(args) if said is None else real(said, "dsa_indexer_k_norm_epsilon")


def _every_and_after(layers: tuple[bool, ...]) -> tuple[int, int]:
    """The inverse of `_indexed`; of layers that are not every so many, those of all."""
    if False not in layers:
        return 1, 1
    after = layers.index(False)
    every = (*layers, True).index(True, after) - after + 1
    return (every, after) if _indexed(len(layers), every, after) == layers else (1, 1)


def _indexed(num_layers: int, every: int, after: int) -> tuple[bool, ...]:
    """Which layers have an indexer: the first ones, and after the layer of number `after` each of this number."""
    return tuple(max(layer - max(after, 1), 0) % every == 0 for layer in range(1, num_layers + 1))


def csa_args(model: ModelShape, yarn: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of attention with compressed keys, which are made of latent attention's; `yarn` are those of its rotary
    scaling."""
    if model.csa is None:
        return {}
    local = model.rotary_base_local or model.rotary_base
    return {
        "experimental_attention_variant": CSA_NAME,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        **{argument: getattr(model.csa, field) for argument, field in _CSA.items()},
        "csa_compress_ratios": model.csa.ratios(model.mtp_num_layers),
        "csa_compress_rotary_base": model.rotary_base,
        "v_head_dim": model.kv_channels,
        "qk_pos_emb_head_dim": model.rotary_size,
        "rotary_base": int(local) if local.is_integer() else local,
        "rotary_percent": 1.0,  # of the channels that have positions
        "rope_type": "yarn",
        **yarn,
    }


def read_csa(args: Mapping[str, Any], num_layers: int) -> CSA | None:
    """The inverse, of what is in CSA; None where there is none."""
    if args.get("experimental_attention_variant") != CSA_NAME:
        return None
    if args.get("rotary_percent", 1.0) != 1:
        raise UnknownArchitecture(f"no family known here has rotary_percent={args['rotary_percent']} beside {CSA_NAME}")
    ratios, kinds = needed(args, "csa_compress_ratios"), {ratio: kind for kind, ratio in CSA.RATIOS.items()}
    if not isinstance(ratios, list | tuple) or len(ratios) < num_layers:
        raise DamagedCheckpoint(f"csa_compress_ratios is {shown(ratios)}, without an entry for each layer")
    if unknown := [ratio for ratio in ratios[:num_layers] if ratio not in kinds]:
        raise UnknownArchitecture(f"no family known here has csa_compress_ratios of {shown(unknown[0])}")
    pattern = "".join(kinds[ratio] for ratio in ratios[:num_layers])
    return CSA(pattern, **{field: needed(args, argument) for argument, field in _CSA.items()})


def read_csa_rope(args: Mapping[str, Any], yarn: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse, of the fields of ModelShape that say rotary embeddings."""
    return {
        "rotary_base": float(needed(args, "csa_compress_rotary_base")),
        "rotary_base_local": float(needed(args, "rotary_base")),
        "rotary_percent": needed(args, "qk_pos_emb_head_dim") / needed(args, "v_head_dim"),
        "rope_scaling": None if yarn["factor"] == 1 else {**yarn, "attention_factor": 1.0},
    }
