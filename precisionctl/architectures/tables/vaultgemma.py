"""VaultGemma, trained with differential privacy: Gemma 2 without the norms after a block."""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.tables.gemma2 import ARCHITECTURE as GEMMA_2

ARCHITECTURE = Architecture(
    model_types={"vaultgemma": "VaultGemmaForCausalLM"},
    rows=llama.model_rows(*llama.ATTENTION_NORM, *llama.ATTENTION, *llama.PRE_MLP_NORM, *llama.MLP),
    config=(*GEMMA_2.config, keys.always("post_layernorms", False)),  # the last entry of a field decides
)
