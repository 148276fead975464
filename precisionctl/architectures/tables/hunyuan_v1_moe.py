"""Hunyuan with experts (Hunyuan-A13B): Hunyuan's attention before experts in every layer, beside an MLP that all tokens
go through.

Traps: `intermediate_size` is an expert's and that MLP's; `moe_topk` may be a list with an entry for each layer.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, renamed
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.architectures.shared.moe_keys import INTERMEDIATE_SIZE_OF_EXPERTS
from precisionctl.architectures.tables.hunyuan_v1_dense import ATTENTION, ROPE
from precisionctl.errors import UnknownArchitecture, shown

_ROUTING = renamed(
    (*moe.ROUTER, *moe.SHARED_EXPERTS),
    {"mlp.gate.weight": "mlp.gate.wg.weight", "mlp.shared_experts": "mlp.shared_mlp"},
)


def _read_topk(config: keys.Config) -> keys.Fields:
    said = config.get("moe_topk", 1)
    listed = said if isinstance(said, list) else [said]
    if not listed or any(each != listed[0] for each in listed):
        what = f"moe_topk={shown(said)}"
        raise UnknownArchitecture(what, do="Known are as many experts of a token in all layers.")
    return {"moe.topk": keys.size({"moe_topk": listed[0]}, "moe_topk")}


ARCHITECTURE = Architecture(
    model_types={"hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM"},
    rows=llama.model_rows(*llama.ATTENTION_NORM, *ATTENTION, *moe.MOE_NORM, *_ROUTING, *moe.EXPERTS),
    config=llama_keys(
        keys.only("use_qk_norm", True, "qk_layernorm", True),
        keys.always("qk_layernorm_after_rope", True),
        keys.Key("moe.num_experts", "num_experts", 1, synonym="num_local_experts"),
        keys.Rule(("moe_topk",), _read_topk, lambda model: {"moe_topk": keys.part_of(model, "moe").topk}),
        keys.synonyms({"num_experts_per_tok": "moe_topk"}),
        INTERMEDIATE_SIZE_OF_EXPERTS,
        keys.Key("moe.shared_ffn_hidden_size", "intermediate_size"),
        keys.only("use_mixed_mlp_moe", True),
        keys.only("moe_layer_num_skipped", 0),
        keys.only("use_cla", False),
        attention_bias=True,
        epsilon=1e-5,
        rotary=ROPE,
    ),
)
