"""Falcon 7B, 40B, 180B and 11B: attention and MLP are added together.

Traps: 7B has one norm for both and one key for all heads; 40B and 180B (`new_decoder_architecture`) have two norms
unless `num_ln_in_parallel_attn` is 1, as in 11B; `query_key_value` is q, k, v by group, as in Megatron.
"""

from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import TIED, Architecture, only_with, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.tables.gpt2 import sizes
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape

NAMES = {
    "model.embed_tokens": "transformer.word_embeddings",
    "model.layers.": "transformer.h.",
    "model.norm": "transformer.ln_f",
    "self_attn.query_key_value": "self_attention.query_key_value",
    "self_attn.o_proj": "self_attention.dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
}
_ONE_NORM = only_with("one_layernorm", llama.SEPARATE_LAYER_NORM)
_TWO_NORMS = only_with(
    "fused_layernorms",
    renamed(
        (*llama.ATTENTION_LAYER_NORM, *llama.MLP_LAYER_NORM),
        {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"},
    ),
)


def _read_decoder(config: keys.Config) -> keys.Fields:
    heads = keys.size(config, "num_attention_heads")
    norms = config.get("num_ln_in_parallel_attn")
    if keys.is_on(config, "new_decoder_architecture"):
        groups = heads if config.get("num_kv_heads") is None else keys.size(config, "num_kv_heads")
        known: tuple[int | None, ...] = (None, 1, 2)
    else:
        groups = 1 if keys.is_on(config, "multi_query", True) else heads
        known = (None, 1)  # with two, its class has no norm where it looks for one
    if norms not in known:
        what = f"num_ln_in_parallel_attn={shown(norms)}"
        raise UnknownArchitecture(what, do=f"Known here are {known[1:]}.")
    return {"num_query_groups": groups, "shared_layernorm": len(known) == 2 or norms == 1}


def _write_decoder(model: ModelShape) -> keys.Config:
    if model.shared_layernorm and model.num_query_groups == 1:
        return {"new_decoder_architecture": False, "multi_query": True}
    return {
        "new_decoder_architecture": True,
        "num_kv_heads": model.num_query_groups,
        "num_ln_in_parallel_attn": 1 if model.shared_layernorm else 2,
    }


ARCHITECTURE = Architecture(
    model_types={"falcon": "FalconForCausalLM"},
    rows=renamed(
        (
            *llama.EMBEDDING,
            *_ONE_NORM,
            *_TWO_NORMS,
            *llama.JOINED_QKV,
            *llama.PROJ,
            *llama.UNGATED_MLP,
            *llama.FINAL_LAYER_NORM,
            *llama.OUTPUT,
        ),
        NAMES,
    ),
    config=(
        sizes("num_hidden_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size"),
        keys.synonyms({"n_embed": "hidden_size"}),
        keys.Key("max_position_embeddings", "max_position_embeddings", 2048),
        keys.VOCABULARY,
        keys.Rule(
            ("new_decoder_architecture", "multi_query", "num_kv_heads", "num_ln_in_parallel_attn"),
            _read_decoder,
            _write_decoder,
        ),
        keys.only("alibi", False),
        keys.only("parallel_attn", True),
        keys.only("apply_residual_connection_post_layernorm", False),
        keys.biases("bias", False),
        keys.activation("activation", {"gelu": "gelu", **keys.GELU_TANH}, "gelu"),
        keys.always("gated_linear_unit", False),
        keys.always("normalization", "LayerNorm"),
        keys.always("parallel_residual", True),
        keys.Key("norm_epsilon", "layer_norm_epsilon", 1e-5),
        rope(),
        keys.tied(True),
    ),
    aliases=(replace(TIED, of="transformer.word_embeddings.weight"),),
    derived=("transformer.h.{layer}.self_attention.rotary_emb.inv_freq",),
    names_by="this project",
)
