"""Mamba-2: mixers alone, each a layer of Megatron's hybrid stack with the norm before it.

Traps: `num_heads` and `head_dim` are the mixers'.
"""

from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import TIED, Architecture
from precisionctl.architectures.shared.mamba_keys import mixer_heads, mixers_alone, step_limits, with_mixers_heads
from precisionctl.architectures.shared.mamba_rows import MIXER, mixers_alone as rows_of_mixers

ARCHITECTURE = Architecture(
    model_types={"mamba2": "Mamba2ForCausalLM"},
    rows=rows_of_mixers(MIXER),
    config=(
        *mixers_alone(64, 4096),
        keys.VOCABULARY,
        with_mixers_heads(mixer_heads("num_heads", "head_dim", "expand", 64)),
        keys.Key("mamba.num_groups", "n_groups", 8),
        keys.Key("mamba.state_dim", "state_size", 128),
        step_limits("time_step_limit"),
        keys.tied(False),
    ),
    aliases=(replace(TIED, of="backbone.embeddings.weight"),),
)
