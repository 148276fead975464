"""nanochat: norms without weights, of embeddings and of each query and key too, an MLP of squared ReLUs, capped logits.

Traps: rotary pairs turn the other way than everywhere else. So the halves of each head of queries and keys change
places on the way to Megatron, which makes the same scores of them. Megatron's norms have weights: they are stored less
one, and are zeros, which nothing trains. A cap that is null is none.
"""

from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.head_rearrangements import QKV_TURNED_BACK
from precisionctl.architectures.param_map import Architecture, Condition, renamed
from precisionctl.architectures.rearrangements import SAME
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama

_NORMS = tuple(
    replace(row, rearrangement=SAME, present=Condition("norm_weight"))
    for row in (*llama.ATTENTION_NORM, *llama.MLP_NORM, *llama.FINAL_NORM)
)
_QKV = tuple(replace(row, rearrangement=QKV_TURNED_BACK) for row in llama.QKV_LINEAR)
_MLP = renamed(llama.UNGATED_MLP, {".mlp.up_proj.": ".mlp.fc1.", ".mlp.down_proj.": ".mlp.fc2."})

ARCHITECTURE = Architecture(
    model_types={"nanochat": "NanoChatForCausalLM"},
    rows=llama.model_rows(*_NORMS, *_QKV, *llama.PROJ, *_MLP, ending=()),
    config=(
        *keys.SIZES,
        keys.heads(num_attention_heads=6),
        keys.ATTENTION_BIAS,
        keys.activation("hidden_act", {"relu2": "squared_relu"}, "relu2"),
        keys.always("gated_linear_unit", False),
        keys.always("norm_weight", False),
        keys.always("zero_centered_gamma", True),
        keys.always("embedding_norm", True),
        keys.always("qk_l2_norm", True),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        keys.Key("final_logit_softcapping", "final_logit_softcapping", None, absent=15.0),
        rope(),
        keys.tied(False),
    ),
)
