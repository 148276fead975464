"""Mistral 4: DeepSeek-V3's latent attention and shared experts, experts chosen by softmax, queries as Ministral 3's.

Traps: `partial_rotary_factor` and `head_dim` say again what share of a head `qk_rope_head_dim` is; a config.json
without rotary parameters has YaRN; its class saves the experts of a layer in one tensor. It is published in Mistral 3's
wrapper.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, moe_rows as moe
from precisionctl.architectures.tables.ministral3 import YARN
from precisionctl.errors import UnknownArchitecture, shown

_ROPE = rope(
    scaling=YARN | {"rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192},
    partial=True,
    query_scaling=True,
)


def _read_rope(config: keys.Config) -> keys.Fields:
    fields = {**_ROPE.read(config)}
    turned, plain = (keys.size(config, key) for key in ("qk_rope_head_dim", "qk_nope_head_dim"))
    said = {"partial_rotary_factor": fields.pop("rotary_percent"), "head_dim": config.get("head_dim", turned + plain)}
    for key, known in (("partial_rotary_factor", (1, turned / (turned + plain))), ("head_dim", (turned + plain,))):
        if said[key] not in known:
            what = f"{key} is {shown(said[key])}, and {turned} of {turned + plain} channels have positions"
            raise UnknownArchitecture(what)
    return fields


ARCHITECTURE = Architecture(
    model_types={"mistral4": "Mistral4ForCausalLM"},
    behind={"gate": "experts"},
    rows=deepseek_rows.decoder(deepseek_rows.ATTENTION, moe.FUSED_EXPERTS),
    config=(
        *deepseek_keys.latent_attention(1024),
        *deepseek_keys.experts(shared=1, dense=0),
        keys.only("norm_topk_prob", True),
        keys.only("n_group", 1),  # more would be worth their probabilities, not their logits
        keys.only("topk_group", 1),
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.0),
        keys.only("rope_interleave", True),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        keys.Rule(
            (*_ROPE.keys, "head_dim"),
            _read_rope,
            lambda model: {  # in one object, to which its class adds the share of a head
                "rope_parameters": {
                    **_ROPE.write(model).get("rope_scaling", {"rope_type": "default"}),
                    "rope_theta": model.rotary_base,
                }
            },
        ),
        keys.tied(False),
    ),
)
