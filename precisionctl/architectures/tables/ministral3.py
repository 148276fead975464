"""Ministral 3: Mistral whose queries grow with their position, beyond the context before YaRN.

Traps: a config.json without rotary parameters has YaRN; vLLM looks for how queries grow under a key of its own.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import everywhere, sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.architectures.tables.llama import ARCHITECTURE as LLAMA
from precisionctl.model.model_shape import ModelShape

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_OF_VLLM = "llama_4_scaling"


def _write_query_scaling(model: ModelShape) -> keys.Config:
    if model.query_scaling_beta is None:
        return {}
    original = (model.rope_scaling or {})["original_max_position_embeddings"]
    return {_OF_VLLM: {"original_max_position_embeddings": original, "beta": model.query_scaling_beta}}


ARCHITECTURE = Architecture(
    model_types={"ministral3": "Ministral3ForCausalLM"},
    rows=LLAMA.rows,
    config=llama_keys(
        heads=keys.heads(num_key_value_heads=8, head_dim=128),
        epsilon=1e-5,
        rotary=rope(scaling=YARN, query_scaling=True),
        after_rotary=(
            keys.Rule((_OF_VLLM,), write=_write_query_scaling),
            sliding_window(everywhere, listed=False),
        ),
    ),
)
