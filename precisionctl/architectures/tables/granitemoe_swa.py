"""Granite-MoE with a shared expert, windows and attention sinks.

Trap: experts are stored under the names that Granite-MoE has in memory alone.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.tables.gpt_oss import SINKS
from precisionctl.architectures.tables.granite import OF_ALL_GRANITES
from precisionctl.architectures.tables.granite_swa import LAYERS
from precisionctl.architectures.tables.granitemoe import EXPERT_KEYS, IN_MEMORY
from precisionctl.architectures.tables.granitemoeshared import SHARED

ARCHITECTURE = Architecture(
    model_types={"granitemoe_swa": "GraniteMoeSWAForCausalLM"},
    rows=llama.model_rows(
        *llama.ATTENTION_NORM, *llama.ATTENTION, *SINKS, *moe.MOE_NORM, *IN_MEMORY, *moe.JOINED_SHARED_EXPERT
    ),
    config=(
        *OF_ALL_GRANITES,
        keys.HEADS,
        *EXPERT_KEYS,
        SHARED,
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        *LAYERS,
        keys.tied(False),
    ),
)
