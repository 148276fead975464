"""Mistral Large 4 (text): GLM-5's latent attention and indexers, Mistral 4's experts. Queries are projected in one
step, and grow with their position by two learned numbers of each head. Every fourth layer has no rotary embeddings;
there all channels of a key are the head's own. A layer may read the latent of an earlier one.

Traps: rotary embeddings are YaRN's, whose angles are multiplied by the exponentials of a tensor (LeRoPE), which is
FP32, as routers are; an indexer's queries are made of hidden states, through a LayerNorm of their own; published files
have Mistral's own names, with nothing before `layers`. Published is the wrapper alone, and of a text model by itself
transformers has no class.
"""

from collections.abc import Iterator
from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, Either, Row, only_in, renamed, when
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, llama_rows as llama, moe_rows as moe
from precisionctl.architectures.tables.glm_moe_dsa import INDEXERS
from precisionctl.architectures.tables.smollm3 import ROPE_LAYERS, with_rope
from precisionctl.errors import UnknownArchitecture
from precisionctl.param import REPLICATED, ROWS, Parallel

_HF, _MEGATRON = "model.layers.{layer}.self_attn.", "decoder.layers.{layer}.self_attention."
_IN_NOPE_LAYERS = {"kv_down_size": "mla.kv_lora_rank", "key_value_size": "nope_key_value_size"}


def _attention() -> Iterator[Row]:
    """GLM-5's rows, but for latents of queries: of another size in layers without rotary embeddings, and of a latent
    only where a layer has one of its own."""
    for row in deepseek_rows.INDEXED_ATTENTION:
        if row.present == when("query_latent"):
            continue
        if ".wq_b." in row.hf[0]:
            row = replace(row, sizes=("dsa.query_size", "hidden_size"))
        if ".kv_a_" in row.hf[0]:
            row = replace(row, shares_kv=False)
        sizes = tuple(_IN_NOPE_LAYERS.get(str(size), size) for size in row.sizes)
        yield row if sizes == row.sizes else replace(row, layers="rope")
        if sizes != row.sizes:
            yield replace(row, layers="nope", sizes=sizes)


def _of_heads(hf: str, megatron: str, heads: str, parallel: Parallel) -> tuple[Row, Row]:
    """The two numbers of each head that its queries are multiplied by."""
    scale, bias = (
        Row(
            f"{_HF}{hf}softmax_scaling.{each}",
            f"{_MEGATRON}{megatron}softmax_scaling.{each}",
            (heads,),
            parallel=parallel,
        )
        for each in ("scale", "bias")
    )
    return scale, bias


_QUERIES_OF_INDEXERS = (
    *(
        Row(
            f"{_HF}indexer.q_input_norm.{each}",
            f"{_MEGATRON}core_attention.indexer.q_input_norm.{each}",
            ("hidden_size",),
            keeps_dtype=True,  # as the norm of its keys
        )
        for each in ("weight", "bias")
    ),
    *_of_heads("indexer.", "core_attention.indexer.", "dsa.n_heads", REPLICATED),
)

_LEROPE = Row("model.rotary_emb.alpha", "embedding.lerope.alpha", ("rotary_pairs",), keeps_dtype=True)

_IN_MEMORY = (
    *llama.EMBEDDING,
    _LEROPE,
    *_attention(),
    *_of_heads("", "", "num_attention_heads", ROWS),
    *only_in("indexed", _QUERIES_OF_INDEXERS),
    *llama.MLP_NORM,
    *llama.MLP,
    *moe.MOE_NORM,
    *moe.WIDE_ROUTER,
    *moe.SHARED_EXPERTS,
)

_PUBLISHED = {
    ".embed_tokens.": ".tok_embeddings.",
    ".rotary_emb.": ".lerope.",
    ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".self_attn.": ".attention.",
    ".q_proj.": ".wq.",
    ".kv_a_proj_with_mqa.": ".wkv_a_with_mqa.",
    ".kv_a_layernorm.": ".kv_a_norm.",
    ".kv_b_proj.": ".wkv_b.",
    ".o_proj.": ".wo.",
    ".softmax_scaling.scale": ".ssmax_scaling.s",
    ".softmax_scaling.bias": ".ssmax_scaling.b",
    ".gate_proj.": ".w1.",
    ".down_proj.": ".w2.",
    ".up_proj.": ".w3.",
    ".mlp.gate.": ".gate.",
    ".mlp.shared_experts.": ".shared_experts.",
    ".mlp.": ".feed_forward.",
}

_EXPERTS = moe.experts("model.layers.{layer}.experts")


def _read_sources(config: keys.Config) -> keys.Fields:
    """Raises UnknownArchitecture for a source whose latent transformers does not read: a layer reads the last one of
    its kind, with rotary embeddings or without, that others read."""
    listed, number = config.get("kv_source_layers"), keys.layers(config)
    if listed is None or listed == [*range(number)]:
        return {}
    keys.as_list(listed, "kv_source_layers", "layers", kinds=(int,))
    kinds = with_rope(config)
    last: dict[bool, int] = {}
    for layer, (source, kind) in enumerate(zip(listed, kinds, strict=False)):
        if source == layer and layer in listed[layer + 1 :]:
            last[kind] = layer
        elif source != layer and last.get(kind) != source:
            what = f"layer {layer} reads the latent of layer {source}, and in transformers that of {last.get(kind)}"
            raise UnknownArchitecture(what, do="Known are sources that are the last of their kind.")
    return {"mla.kv_source_layers": tuple(listed)}


ARCHITECTURE = Architecture(
    model_types={"mistral_large4_text": "MistralLarge4ForCausalLM"},
    rows=(
        Either(renamed(_IN_MEMORY, _PUBLISHED), in_memory=_IN_MEMORY),
        Either(_EXPERTS, in_memory=moe.FUSED),
        *llama.FINAL_NORM,
        *llama.OUTPUT,
    ),
    config=(
        *deepseek_keys.latent_attention(None),
        keys.only("q_lora_rank", None),
        keys.always("mla.nope_keys_by_head", True),
        keys.Rule(
            ("kv_source_layers",),
            _read_sources,
            lambda model: {"kv_source_layers": [model.kv_layer(layer) for layer in range(model.num_layers)]},
        ),
        keys.always("softmax_scaling", True),
        *deepseek_keys.experts_of_a_layer(shared=1),
        deepseek_keys.experts_by_list(dense=1, key="first_k_dense_replace"),
        keys.only("n_group", 1),  # more would be worth their probabilities, not their logits
        keys.only("topk_group", 1),
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.0),
        keys.Key("dsa.n_heads", "index_n_heads", 32),
        *deepseek_keys.INDEXER,
        keys.always("dsa.rope_interleaved", True),
        INDEXERS,
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(
            scaling={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 2048.0,
                "original_max_position_embeddings": 512,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "attention_factor": 1.0,
            }
        ),
        keys.always("lerope", True),
        ROPE_LAYERS,
        keys.Key("final_logit_softcapping", "final_logit_softcapping", 30.0),
        keys.only("tie_word_embeddings", False),
    ),
    aliases=(),
    names_by="this project",
    heeds_latents_epsilon=True,
)
