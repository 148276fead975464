"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 with one key and value for all heads.

Traps: matrices are stored `[out, in]`, other than GPT-2's; `c_attn` is q, k, v as in Megatron: by head where each head
has a key of its own.
"""

from precisionctl.architectures.config_keys import (
    ALL_BIASES,
    GELU_TANH,
    Always,
    Config,
    Fields,
    Only,
    Rule,
    activation,
    is_on,
    size,
    tied,
)
from precisionctl.architectures.param_map import Alias, Architecture
from precisionctl.architectures.shared.llama_rows import OUTPUT
from precisionctl.architectures.tables.gpt2 import OF_LINEARS, SIZES
from precisionctl.model.model_shape import ModelShape


def _read_groups(config: Config) -> Fields:
    return {"num_query_groups": 1 if is_on(config, "multi_query", True) else size(config, "n_head")}


def _write_groups(model: ModelShape) -> Config:
    return {"multi_query": model.num_query_groups == 1}


ARCHITECTURE = Architecture(
    model_types={"gpt_bigcode": "GPTBigCodeForCausalLM"},
    rows=(*OF_LINEARS, *OUTPUT),
    config=(
        *(entry for entry in SIZES if "activation_function" not in entry.keys),
        activation("activation_function", {**GELU_TANH, "gelu": "gelu"}, "gelu_pytorch_tanh"),
        Rule(("multi_query",), _read_groups, _write_groups),
        Always("position_embedding", "learned_absolute"),
        *ALL_BIASES,
        Only("scale_attn_weights", True),
        Only("add_cross_attention", False),
        tied(True),
    ),
    aliases=(Alias("lm_head.weight", of="transformer.wte.weight", switch="tied_embeddings"),),
    derived=("transformer.h.{layer}.attn.bias", "transformer.h.{layer}.attn.masked_bias"),
)
