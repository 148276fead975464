"""Llama 2 and 3, Yi (which calls itself `llama`) and Mistral: the same decoder, the same names.

Mistral differs by its sliding window alone, Llama 3 by its rotary scaling; neither touches a tensor.
"""

from precisionctl.architectures.param_map import (
    QKV,
    Alias,
    Architecture,
    GateUp,
    Present,
    Same,
    Vocabulary,
)
from precisionctl.param import COLUMNS

# Megatron has one switch for all biases and one for QKV's alone, Hugging Face one for the attention and one for the MLP
_ATTENTION_BIAS = Present("attention_bias", ("add_bias_linear",))
_QKV_BIAS = Present("attention_bias", ("add_bias_linear", "add_qkv_bias"))
_MLP_BIAS = Present("mlp_bias", ("add_bias_linear",))
_UNTIED = Present("untied_embeddings", ("untied_embeddings",))

ARCHITECTURE = Architecture(
    model_types={"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"},
    rows=(
        Vocabulary("model.embed_tokens.weight", "embedding.word_embeddings.weight"),
        Same(
            "model.layers.{layer}.input_layernorm.weight",
            "decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight",
            sizes=("hidden_size",),
        ),
        QKV(
            "model.layers.{layer}.self_attn.q_proj.weight",
            "model.layers.{layer}.self_attn.k_proj.weight",
            "model.layers.{layer}.self_attn.v_proj.weight",
            "decoder.layers.{layer}.self_attention.linear_qkv.weight",
        ),
        QKV(
            "model.layers.{layer}.self_attn.q_proj.bias",
            "model.layers.{layer}.self_attn.k_proj.bias",
            "model.layers.{layer}.self_attn.v_proj.bias",
            "decoder.layers.{layer}.self_attention.linear_qkv.bias",
            present=_QKV_BIAS,
            gemm=False,
        ),
        Same(
            "model.layers.{layer}.self_attn.o_proj.weight",
            "decoder.layers.{layer}.self_attention.linear_proj.weight",
            sizes=("hidden_size", "projection_size"),
            parallel=COLUMNS,
            gemm=True,
        ),
        Same(
            "model.layers.{layer}.self_attn.o_proj.bias",
            "decoder.layers.{layer}.self_attention.linear_proj.bias",
            sizes=("hidden_size",),
            present=_ATTENTION_BIAS,
        ),
        Same(
            "model.layers.{layer}.post_attention_layernorm.weight",
            "decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight",
            sizes=("hidden_size",),
        ),
        GateUp(
            "model.layers.{layer}.mlp.gate_proj.weight",
            "model.layers.{layer}.mlp.up_proj.weight",
            "decoder.layers.{layer}.mlp.linear_fc1.weight",
        ),
        GateUp(
            "model.layers.{layer}.mlp.gate_proj.bias",
            "model.layers.{layer}.mlp.up_proj.bias",
            "decoder.layers.{layer}.mlp.linear_fc1.bias",
            present=_MLP_BIAS,
            gemm=False,
        ),
        Same(
            "model.layers.{layer}.mlp.down_proj.weight",
            "decoder.layers.{layer}.mlp.linear_fc2.weight",
            sizes=("hidden_size", "ffn_hidden_size"),
            parallel=COLUMNS,
            gemm=True,
        ),
        Same(
            "model.layers.{layer}.mlp.down_proj.bias",
            "decoder.layers.{layer}.mlp.linear_fc2.bias",
            sizes=("hidden_size",),
            present=_MLP_BIAS,
        ),
        Same("model.norm.weight", "decoder.final_layernorm.weight", sizes=("hidden_size",)),
        Vocabulary("lm_head.weight", "output_layer.weight", present=_UNTIED),
    ),
    aliases=(Alias("lm_head.weight", of="model.embed_tokens.weight", switch="tied_embeddings"),),
    derived=("model.layers.{layer}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
)
