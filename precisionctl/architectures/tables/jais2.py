"""Jais 2: Nemotron's layers with ordinary LayerNorms, whose whole heads are rotated.

Trap: attention and MLP have biases unless config.json says otherwise.
"""

from precisionctl.architectures.config_keys import HEADS, SIZES, Always, Key, Only, attention_bias, tied
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.tables.nemotron import ARCHITECTURE as NEMOTRON

ARCHITECTURE = Architecture(
    model_types={"jais2": "Jais2ForCausalLM"},
    rows=NEMOTRON.rows,
    config=(
        *SIZES,
        HEADS,
        attention_bias(True),
        Key("mlp_bias", "mlp_bias", True),
        Only("hidden_act", "relu2", "activation", "squared_relu"),
        Always("gated_linear_unit", False),
        Always("normalization", "LayerNorm"),
        Key("norm_epsilon", "layer_norm_eps", 1e-5),
        rope(),
        tied(False),
    ),
)
