"""DeepSeek-V2: latent attention, leading dense layers, shared experts; experts chosen by softmax over all.

Traps: rotary channels are neighbouring pairs, in both layouts; a group of experts is worth its best one, where
Megatron sums the best `topk / group_topk`.
"""

from precisionctl.architectures.config_keys import Always, Config, Fields, Key, Only, Rule
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared.deepseek_keys import COMMON, experts
from precisionctl.architectures.shared.deepseek_rows import ATTENTION, decoder
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape


def _read_groups(config: Config) -> Fields:
    method = config.get("topk_method")
    if method in (None, "greedy"):
        return {}
    if method != "group_limited_greedy":
        raise UnknownArchitecture(f"topk_method {shown(method)}", do="Known: group_limited_greedy, greedy.")
    return {
        "moe.num_groups": config.get("n_group"),
        "moe.group_topk": config.get("topk_group"),
        "moe.group_scores": 1,
    }


def _write_groups(model: ModelShape) -> Config:
    if model.moe is None or model.moe.num_groups is None:
        return {"topk_method": "greedy"}
    groups = {"n_group": model.moe.num_groups, "topk_group": model.moe.group_topk}
    return {"topk_method": "group_limited_greedy", **groups}


ARCHITECTURE = Architecture(
    model_types={"deepseek_v2": "DeepseekV2ForCausalLM"},
    behind={"gate": "experts"},
    rows=decoder(ATTENTION),
    config=(
        *COMMON,
        *(entry for entry in experts(shared=2, dense=0) if "n_routed_experts" not in entry.keys),
        Key("moe.num_experts", "n_routed_experts", synonym="num_experts"),
        Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.0),
        Only("mlp_bias", False),
        Only("scoring_func", "softmax"),
        Only("norm_topk_prob", False),
        Always("moe.pre_softmax", True),
        Rule(("topk_method", "n_group", "topk_group"), _read_groups, _write_groups),
    ),
)
