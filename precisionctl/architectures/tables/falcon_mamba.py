"""FalconMamba: a Mamba whose steps, B and C are normalised.

Trap: these norms have no weights, and an epsilon of their own.
"""

from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.tables.mamba import ARCHITECTURE as MAMBA

ARCHITECTURE = replace(
    MAMBA,
    model_types={"falcon_mamba": "FalconMambaForCausalLM"},
    config=(*MAMBA.config, keys.Key("mamba.bcdt_l2_norm_epsilon", "mixer_rms_eps", 1e-6)),
)
