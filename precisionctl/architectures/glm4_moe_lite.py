"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts.

Trap: a list says which layers have experts.
"""

from precisionctl.architectures.config_keys import Config, Fields, Key, Only, Rule, layers, tied
from precisionctl.architectures.deepseek_keys import EXPERTS_OF_A_LAYER, LATENT_ATTENTION, SIGMOID, groups
from precisionctl.architectures.deepseek_rows import ATTENTION, MTP_ALIASES, decoder, prediction
from precisionctl.architectures.llama_rows import ROTARY, TIED
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.errors import DamagedCheckpoint, shown
from precisionctl.model_shape import MOST_LAYERS, ModelShape

_KINDS = {"dense": False, "sparse": True}


def _read_layers(config: Config, where: object) -> Fields:
    listed = config.get("mlp_layer_types")
    if listed is None:
        return {"moe.layer_freq": tuple(layer > 0 for layer in range(layers(config, where)))}
    if not isinstance(listed, list) or len(listed) > MOST_LAYERS or any(kind not in _KINDS for kind in listed):
        raise DamagedCheckpoint(f"mlp_layer_types is {shown(listed)}, not a list of `dense` and `sparse`", where=where)
    return {"moe.layer_freq": tuple(_KINDS[kind] for kind in listed)}


def _write_layers(model: ModelShape) -> Config:
    numbers = range(model.num_layers)
    return {"mlp_layer_types": ["sparse" if model.has_experts(layer) else "dense" for layer in numbers]}


ARCHITECTURE = Architecture(
    model_types={"glm4_moe_lite": "Glm4MoeLiteForCausalLM"},
    rows=(*decoder(ATTENTION), *prediction(ATTENTION)),
    config=(
        *LATENT_ATTENTION,
        *EXPERTS_OF_A_LAYER,
        Rule(("mlp_layer_types",), _read_layers, _write_layers),
        *SIGMOID,
        Only("norm_topk_prob", True),
        groups(1, 1),
        Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.8),
        Only("rope_interleave", True),
        Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(),
        Key("mtp_num_layers", "num_nextn_predict_layers", 0),
        tied(False),
    ),
    aliases=(TIED, *MTP_ALIASES),
    derived=ROTARY,
)
