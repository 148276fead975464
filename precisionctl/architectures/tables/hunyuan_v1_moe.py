"""Hunyuan with experts (Hunyuan-A13B): Hunyuan's attention before experts in every layer, beside an MLP that all tokens
go through.

Traps: `intermediate_size` is an expert's and that MLP's; `moe_topk` may be a list with an entry for each layer.
"""

from precisionctl.architectures.config_keys import (
    ATTENTION_BIAS,
    HEADS,
    SILU,
    SIZES,
    Always,
    Config,
    Fields,
    Key,
    Only,
    Rule,
    Synonyms,
    tied,
)
from precisionctl.architectures.param_map import Architecture, renamed
from precisionctl.architectures.shared.llama_rows import ATTENTION_NORM, model_rows
from precisionctl.architectures.shared.moe_rows import EXPERTS, MOE_NORM, ROUTER, SHARED_EXPERTS
from precisionctl.architectures.tables.hunyuan_v1_dense import ATTENTION, ROPE
from precisionctl.architectures.tables.mixtral import EXPERTS_EVERYWHERE
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape

_ROUTING = renamed(
    (*ROUTER, *SHARED_EXPERTS), {"mlp.gate.weight": "mlp.gate.wg.weight", "mlp.shared_experts": "mlp.shared_mlp"}
)


def _read_topk(config: Config) -> Fields:
    said = config.get("moe_topk", 1)
    if not isinstance(said, list):
        return {"moe.topk": said}
    if not said or any(each != said[0] for each in said):
        what = f"moe_topk={shown(said)}"
        raise UnknownArchitecture(what, do="Known are as many experts of a token in all layers.")
    return {"moe.topk": said[0]}


def _write_topk(model: ModelShape) -> Config:
    return {"moe_topk": model.moe.topk} if model.moe else {}


ARCHITECTURE = Architecture(
    model_types={"hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM"},
    rows=model_rows(*ATTENTION_NORM, *ATTENTION, *MOE_NORM, *_ROUTING, *EXPERTS),
    config=(
        *SIZES,
        HEADS,
        ATTENTION_BIAS,
        SILU,
        Only("use_qk_norm", True, "qk_layernorm", True),
        Always("qk_layernorm_after_rope", True),
        Key("moe.num_experts", "num_experts", 1, synonym="num_local_experts"),
        Rule(("moe_topk",), _read_topk, _write_topk),
        Synonyms({"num_experts_per_tok": "moe_topk"}),
        EXPERTS_EVERYWHERE,
        Key("moe.shared_ffn_hidden_size", "intermediate_size"),
        Only("use_mixed_mlp_moe", True),
        Only("moe_layer_num_skipped", 0),
        Only("use_cla", False),
        Key("norm_epsilon", "rms_norm_eps", 1e-5),
        ROPE,
        tied(False),
    ),
)
