"""VaultGemma, trained with differential privacy: Gemma 2 without the norms after a block."""

from precisionctl.architectures.config_keys import Always
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared.gemma_rows import PRE_MLP_NORM
from precisionctl.architectures.shared.llama_rows import ATTENTION, ATTENTION_NORM, MLP, model_rows
from precisionctl.architectures.tables.gemma2 import ARCHITECTURE as GEMMA_2

ARCHITECTURE = Architecture(
    model_types={"vaultgemma": "VaultGemmaForCausalLM"},
    rows=model_rows(*ATTENTION_NORM, *ATTENTION, *PRE_MLP_NORM, *MLP),
    config=(*GEMMA_2.config, Always("post_layernorms", False)),  # the last entry of a field decides
)
