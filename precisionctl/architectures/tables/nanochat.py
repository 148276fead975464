"""nanochat: norms without weights, of embeddings and of each query and key too, an MLP of squared ReLUs, capped logits.

Traps: rotary pairs turn the other way than everywhere else. So the halves of each head of queries and keys change
places on the way to Megatron, which makes the same scores of them. Megatron's norms have weights: they are stored less
one, and are zeros, which nothing trains. A cap that is null is none.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import ATTENTION_BIAS, SIZES, Always, Key, activation, heads, tied
from precisionctl.architectures.head_rearrangements import QKV_TURNED_BACK
from precisionctl.architectures.param_map import Architecture, Condition, renamed
from precisionctl.architectures.rearrangements import SAME
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION_NORM,
    FINAL_NORM,
    MLP_NORM,
    PROJ,
    QKV_LINEAR,
    UNGATED_MLP,
    model_rows,
)

_NORMS = tuple(
    replace(row, rearrangement=SAME, present=Condition("norm_weight"))
    for row in (*ATTENTION_NORM, *MLP_NORM, *FINAL_NORM)
)
_QKV = tuple(replace(row, rearrangement=QKV_TURNED_BACK) for row in QKV_LINEAR)
_MLP = renamed(UNGATED_MLP, {".mlp.up_proj.": ".mlp.fc1.", ".mlp.down_proj.": ".mlp.fc2."})

ARCHITECTURE = Architecture(
    model_types={"nanochat": "NanoChatForCausalLM"},
    rows=model_rows(*_NORMS, *_QKV, *PROJ, *_MLP, ending=()),
    config=(
        *SIZES,
        heads(num_attention_heads=6),
        ATTENTION_BIAS,
        activation("hidden_act", {"relu2": "squared_relu"}, "relu2"),
        Always("gated_linear_unit", False),
        Always("norm_weight", False),
        Always("zero_centered_gamma", True),
        Always("embedding_norm", True),
        Always("qk_l2_norm", True),
        Key("norm_epsilon", "rms_norm_eps", 1e-6),
        Key("final_logit_softcapping", "final_logit_softcapping", None, absent=15.0),
        rope(),
        tied(False),
    ),
)
