"""Mamba: Mamba-1 mixers alone, each a layer of Megatron's hybrid stack with the norm before it.

Traps: `intermediate_size`, which releases have, is a mixer's channels, whatever `expand` says (FalconMamba's is 16, of
mixers twice as wide as the model). Megatron-Core has no Mamba-1 mixers.
"""

from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import TIED, Architecture
from precisionctl.architectures.shared.mamba_keys import mamba_1_sizes, mixers_alone, with_mixers_heads
from precisionctl.architectures.shared.mamba_rows import MAMBA_1_MIXER, mixers_alone as rows_of_mixers

ARCHITECTURE = Architecture(
    model_types={"mamba": "MambaForCausalLM"},
    rows=rows_of_mixers(MAMBA_1_MIXER),
    config=(
        *mixers_alone(32, 768),
        keys.VOCABULARY,
        with_mixers_heads(mamba_1_sizes("expand", "time_step_rank", 768, "intermediate_size")),
        keys.Key("mamba.state_dim", "state_size", 16),
        keys.tied(True),
    ),
    aliases=(replace(TIED, of="backbone.embeddings.weight"),),
    names_by="this project",
)
