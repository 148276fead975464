"""Jais 2: Nemotron's layers with ordinary LayerNorms, whose whole heads are rotated.

Trap: attention and MLP have biases unless config.json says otherwise.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.tables.nemotron import ARCHITECTURE as NEMOTRON

ARCHITECTURE = Architecture(
    model_types={"jais2": "Jais2ForCausalLM"},
    rows=NEMOTRON.rows,
    config=(
        *keys.SIZES,
        keys.HEADS,
        keys.attention_bias(True),
        keys.Key("mlp_bias", "mlp_bias", True),
        keys.only("hidden_act", "relu2", "activation", "squared_relu"),
        keys.always("gated_linear_unit", False),
        keys.always("normalization", "LayerNorm"),
        keys.Key("norm_epsilon", "layer_norm_eps", 1e-5),
        rope(),
        keys.tied(False),
    ),
)
