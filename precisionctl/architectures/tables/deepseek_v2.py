"""DeepSeek-V2: latent attention, leading dense layers, shared experts; experts chosen by softmax over all.

Traps: rotary channels are neighbouring pairs, in both layouts; a group of experts is worth its best one, where
Megatron sums the best `topk / group_topk`.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape


def _read_groups(config: keys.Config) -> keys.Fields:
    method = config.get("topk_method")
    if method in (None, "greedy"):
        return {}
    if method != "group_limited_greedy":
        raise UnknownArchitecture(f"topk_method {shown(method)}", do="Known: group_limited_greedy, greedy.")
    groups, best = (keys.size(config, key) for key in ("n_group", "topk_group"))
    return {"moe.num_groups": groups, "moe.group_topk": best, "moe.group_scores": 1}


def _write_groups(model: ModelShape) -> keys.Config:
    if model.moe is None or model.moe.num_groups is None:
        return {"topk_method": "greedy"}
    groups = {"n_group": model.moe.num_groups, "topk_group": model.moe.group_topk}
    return {"topk_method": "group_limited_greedy", **groups}


EXPERTS: tuple[keys.Entry, ...] = (
    keys.Key("moe.num_experts", "n_routed_experts", synonym="num_experts"),
    keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.0),
    keys.only("mlp_bias", False),
    keys.only("scoring_func", "softmax"),
    keys.only("norm_topk_prob", False),
    keys.always("moe.pre_softmax", True),
    keys.Rule(("topk_method", "n_group", "topk_group"), _read_groups, _write_groups),
)
"""How many there are, and how they are chosen: by a softmax over all, of which their weights are a part."""


ARCHITECTURE = Architecture(
    model_types={"deepseek_v2": "DeepseekV2ForCausalLM"},
    behind={"gate": "experts"},
    rows=deepseek_rows.decoder(deepseek_rows.ATTENTION),
    config=(
        *deepseek_keys.COMMON,
        *(entry for entry in deepseek_keys.experts(shared=2, dense=0) if "n_routed_experts" not in entry.keys),
        *EXPERTS,
    ),
)
