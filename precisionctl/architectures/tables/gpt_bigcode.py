"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 with one key and value for all heads.

Traps: matrices are stored `[out, in]`, other than GPT-2's; `c_attn` is q, k, v as in Megatron: by head where each head
has a key of its own.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Alias, Architecture
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.tables.gpt2 import OF_LINEARS, SIZES

ARCHITECTURE = Architecture(
    model_types={"gpt_bigcode": "GPTBigCodeForCausalLM"},
    rows=(*OF_LINEARS, *llama.OUTPUT),
    config=(
        *(entry for entry in SIZES if "activation_function" not in entry.keys),
        keys.activation("activation_function", {**keys.GELU_TANH, "gelu": "gelu"}, "gelu_pytorch_tanh"),
        keys.Rule(
            ("multi_query",),
            lambda config: {
                "num_query_groups": 1 if keys.is_on(config, "multi_query", True) else keys.size(config, "n_head")
            },
            lambda model: {"multi_query": model.num_query_groups == 1},
        ),
        keys.always("position_embedding", "learned_absolute"),
        *keys.ALL_BIASES,
        keys.only("scale_attn_weights", True),
        keys.only("add_cross_attention", False),
        keys.tied(True),
    ),
    aliases=(Alias("lm_head.weight", of="transformer.wte.weight", switch="tied_embeddings"),),
    derived=("transformer.h.{layer}.attn.bias", "transformer.h.{layer}.attn.masked_bias"),
)
