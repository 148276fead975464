"""What OLMo-core calls the modules of its families, and Hugging Face.

The names are those of ai2-olmo-core 3.0.0 (nn/hf/convert.py), but for two of delta nets, which transformers 5.24 calls
otherwise. Traps: norms of OLMo stand behind attention and MLP, and those of other families before them, under the same
names; the matrices of all experts are one tensor `[experts * in, out]`, and the router is a vector.
"""

from collections.abc import Mapping

LAST_NORM = "lm_head.norm.weight"
"""A tensor that shows names to be OLMo-core's."""

LAYER = "model.layers.#."
_ALL: Mapping[str, str] = {
    "embeddings": "model.embed_tokens",
    "lm_head.norm": "model.norm",
    "lm_head.w_out": "lm_head",
    **{f"blocks.#.attention.w_{each}": f"{LAYER}self_attn.{each}_proj" for each in "qkv"},
    "blocks.#.attention.w_out": f"{LAYER}self_attn.o_proj",
    **{f"blocks.#.attention.{each}_norm": f"{LAYER}self_attn.{each}_norm" for each in "qk"},
    "blocks.#.feed_forward.w1": f"{LAYER}mlp.gate_proj",
    "blocks.#.feed_forward.w2": f"{LAYER}mlp.down_proj",
    "blocks.#.feed_forward.w3": f"{LAYER}mlp.up_proj",
}
_BEFORE: Mapping[str, str] = {
    "blocks.#.attention_norm": f"{LAYER}input_layernorm",
    "blocks.#.feed_forward_norm": f"{LAYER}post_attention_layernorm",
}
_BEHIND: Mapping[str, str] = {
    "blocks.#.attention_norm": f"{LAYER}post_attention_layernorm",
    "blocks.#.feed_forward_norm": f"{LAYER}post_feedforward_layernorm",
}

DELTA_NET: Mapping[str, str] = {
    **{name: hf.replace("self_attn", "linear_attn") for name, hf in _ALL.items()},
    **{f"blocks.#.attention.w_{each}": f"{LAYER}linear_attn.{each}_proj" for each in "abg"},
    **{f"blocks.#.attention.{each}_conv1d": f"{LAYER}linear_attn.{each}_conv1d" for each in "qkv"},
    "blocks.#.attention.o_norm": f"{LAYER}linear_attn.o_norm",
    "blocks.#.attention": f"{LAYER}linear_attn",
    **_BEFORE,
}
"""The modules of layers of OLMo Hybrid with a gated delta net, which has these parameters itself: A_log, dt_bias."""

DECAY = "blocks.#.attention.A_log"
"""A tensor that layers with a delta net have."""

VOCABULARY = ("embeddings", "lm_head.w_out")
"""Modules with a row for each token, and perhaps more."""

ROUTER = "blocks.#.feed_forward_moe.router.weight"
EXPERTS: Mapping[str, str] = {
    "blocks.#.feed_forward_moe.experts.mlp.w1": f"{LAYER}mlp.experts.#.gate_proj.weight",
    "blocks.#.feed_forward_moe.experts.mlp.w2": f"{LAYER}mlp.experts.#.down_proj.weight",
    "blocks.#.feed_forward_moe.experts.mlp.w3": f"{LAYER}mlp.experts.#.up_proj.weight",
}

FAMILIES: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("olmo2", "olmo3", "olmo_hybrid", "flex_olmo"), {**_ALL, **_BEHIND}),
    **dict.fromkeys(("llama", "qwen3"), {**_ALL, **_BEFORE}),
}
"""The modules of a family, but for layers with a delta net, with Hugging Face's names, by the `model_type` of Hugging
Face's model."""
