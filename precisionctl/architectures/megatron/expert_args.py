"""Megatron's arguments that describe experts and their router, both ways."""

from collections.abc import Mapping
from typing import Any

from precisionctl.architectures.megatron.args_said import entries, one_of
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_parts import MoE
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.recurrent_parts import Mamba

BALANCING = "moe_router_load_balancing_type"
CAPACITY = "moe_expert_capacity_factor"
_MOE = {  # argument, field of MoE
    "num_experts": "num_experts",
    "moe_router_topk": "topk",
    "moe_ffn_hidden_size": "ffn_hidden_size",
    "moe_shared_expert_intermediate_size": "shared_ffn_hidden_size",
    "moe_shared_expert_gate": "shared_expert_gate",
    "moe_router_score_function": "score_function",
    "moe_router_pre_softmax": "pre_softmax",
    "moe_router_enable_expert_bias": "expert_bias",
    "moe_router_num_groups": "num_groups",
    "moe_router_group_topk": "group_topk",
}


def moe_args(model: ModelShape) -> dict[str, Any]:
    """The arguments of experts, or that there are none."""
    moe = model.moe
    if moe is None:
        return {"num_experts": None}
    factor = None if moe.topk_scaling_factor == 1 else moe.topk_scaling_factor
    return {
        **{argument: getattr(moe, field) for argument, field in _MOE.items()},
        # Megatron-Core has it for one expert of a token, whose sigmoid it divides by nothing
        **({"moe_apply_probs_on_input": True} if moe.probs_on_input and moe.topk == 1 else {}),
        **({"moe_latent_size": moe.latent_size} if moe.latent_size else {}),  # new in megatron-core 0.16
        **(
            {"moe_n_hash_layers": moe.n_hash_layers, "actual_vocab_size": model.vocab_size} if moe.n_hash_layers else {}
        ),
        # Megatron-Core has the bias beside sigmoids and roots alone
        "moe_router_enable_expert_bias": moe.expert_bias and moe.score_function != "softmax",
        "moe_router_topk_scaling_factor": factor,
        # 1 is Megatron's default: with a list it asks for keys by layer, even where all layers are alike
        "moe_layer_freq": 1 if all(moe.layer_freq) or model.mamba else [int(each) for each in moe.layer_freq],
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def chooses_groups_by_nothing(moe: MoE) -> bool:
    """Whether Megatron-Core would choose a token's groups of experts whatever their scores are: it sums the best
    topk // group_topk scores of a group (group_limited_topk in megatron/core/transformer/moe/moe_utils.py)."""
    return moe.topk < (moe.group_topk or 0) < (moe.num_groups or 0)


def read_moe(args: Mapping[str, Any], num_layers: int, biased: bool, mamba: Mamba | None) -> MoE | None:
    """The inverse; None where there are none. `biased`: whether linears have biases, as a router then does. Layers of
    one block each have experts where the pattern of `mamba` says so."""
    if not args.get("num_experts"):
        if mamba and "E" in mamba.pattern:
            what = (
                f"hybrid_override_pattern {shown(mamba.pattern)} has layers with experts, and num_experts is not said"
            )
            raise DamagedCheckpoint(what)
        return None
    found = {field: args[argument] for argument, field in _MOE.items() if args.get(argument) is not None}
    frequency = args.get("moe_layer_freq", 1)
    if mamba:
        freq = tuple(block == "E" for block in mamba.pattern)
    elif isinstance(frequency, int):
        freq = tuple(layer % frequency == 0 for layer in range(num_layers))
    else:
        freq = entries(frequency)
    defaults: dict[str, Any] = {
        "topk": 2,
        "ffn_hidden_size": args.get("ffn_hidden_size"),
        "layer_freq": freq,
        "router_bias": biased,
    }
    if found.get("group_topk"):
        defaults["group_scores"] = max(1, found.get("topk", defaults["topk"]) // found["group_topk"])
    one_of(args, "moe_router_score_function", ("softmax", "sigmoid", "sqrtsoftplus", None), None)
    if args.get(BALANCING) in ("sinkhorn", "quantile_balancing"):  # these choose experts; others are losses alone
        raise UnknownArchitecture(f"no family known here has Megatron's {BALANCING}={args[BALANCING]}")
    softmax = found.get("score_function", "softmax") == "softmax"  # to others the other way means nothing
    found["pre_softmax"] = bool(found.get("pre_softmax")) and softmax
    found["n_hash_layers"] = args.get("moe_n_hash_layers") or 0
    found["expert_bias"] = bool(found.get("expert_bias"))
    found["shared_expert_gate"] = bool(found.get("shared_expert_gate"))
    found["probs_on_input"] = bool(args.get("moe_apply_probs_on_input"))
    found["latent_size"] = args.get("moe_latent_size")
    factor = args.get("moe_router_topk_scaling_factor") or 1.0
    return MoE(**(defaults | found), topk_scaling_factor=factor)
