"""Granite-MoE with a shared expert, windows and attention sinks.

Trap: experts are stored under the names that Granite-MoE has in memory alone.
"""

from precisionctl.architectures.config_keys import HEADS, Key, tied
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared.llama_rows import ATTENTION, ATTENTION_NORM, model_rows
from precisionctl.architectures.shared.moe_rows import JOINED_SHARED_EXPERT, MOE_NORM
from precisionctl.architectures.tables.gpt_oss import SINKS
from precisionctl.architectures.tables.granite import OF_ALL_GRANITES
from precisionctl.architectures.tables.granite_swa import LAYERS
from precisionctl.architectures.tables.granitemoe import EXPERT_KEYS, IN_MEMORY
from precisionctl.architectures.tables.granitemoeshared import SHARED

ARCHITECTURE = Architecture(
    model_types={"granitemoe_swa": "GraniteMoeSWAForCausalLM"},
    rows=model_rows(*ATTENTION_NORM, *ATTENTION, *SINKS, *MOE_NORM, *IN_MEMORY, *JOINED_SHARED_EXPERT),
    config=(
        *OF_ALL_GRANITES,
        HEADS,
        *EXPERT_KEYS,
        SHARED,
        Key("norm_epsilon", "rms_norm_eps", 1e-6),
        *LAYERS,
        tied(False),
    ),
)
