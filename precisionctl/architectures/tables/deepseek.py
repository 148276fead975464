"""DeepSeekMoE (DeepSeek's first model with experts), and the text model of DeepSeek-OCR 2: Llama's attention before
DeepSeek-V2's experts.

Traps: rotary channels are halves, unlike in V2. Heads are as large as hidden_size / heads, whatever `head_dim` says.
transformers has a class for the text model of DeepSeek-OCR 2 alone, which lists the layers that have experts; published
files of both say how many leading ones have none.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, llama_rows as llama
from precisionctl.architectures.tables.deepseek_v2 import EXPERTS


def _read_heads(config: keys.Config) -> keys.Fields:
    head = keys.size(config, "hidden_size") // keys.size(config, "num_attention_heads")
    keys.check_passed_over(config, {"head_dim": head})
    return keys.HEADS.read(config)


ARCHITECTURE = Architecture(
    model_types={"deepseek": "DeepseekForCausalLM"},
    behind={"gate": "experts"},
    rows=deepseek_rows.decoder((*llama.ATTENTION_NORM, *llama.ATTENTION)),
    config=(
        *keys.SIZES,
        keys.Rule(keys.HEADS.keys, _read_heads, keys.HEADS.write),
        keys.ATTENTION_BIAS,
        keys.SILU,
        *EXPERTS,
        keys.Key("moe.topk", "num_experts_per_tok"),
        keys.Key("moe.ffn_hidden_size", "moe_intermediate_size", 1407),
        deepseek_keys.shared_experts("n_shared_experts", 2, inner=1407),
        deepseek_keys.experts_by_list(dense=0, key="first_k_dense_replace"),
        keys.only("moe_layer_freq", 1),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(),
        keys.tied(False),
    ),
)
