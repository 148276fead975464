"""What LitGPT calls the modules of its families, and Hugging Face.

The names are those of litgpt 0.5.13 (scripts/convert_lit_checkpoint.py; of OLMo 2 convert_hf_checkpoint.py, as the
former has names that its model has not). Trap: queries, keys and values are one matrix in every family, and before 0.5
they had another name and stood by groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

EMBEDDINGS = "transformer.wte.weight"
OUTPUT = "lm_head.weight"

VOCABULARY = ("transformer.wte", "lm_head")
"""Modules with a row for each token, and perhaps more."""

QKV = "transformer.h.#.attn.qkv"
"""Queries, keys and values: the heads of each one after the other."""

OLDER_QKV = "transformer.h.#.attn.attn"
"""The same up to litgpt 0.4: for each group its queries, its key, its value."""


@dataclass(frozen=True)
class LitGptFamily:
    """A family in LitGPT.

    `names` are its modules, with Hugging Face's names, and `qkv` those of queries, keys and values, one of each or one
    for all: then the heads stand in it as in QKV or, with `by_groups`, as in OLDER_QKV. `joined` are modules of Hugging
    Face's whose rows are those of several of LitGPT's.
    """

    names: Mapping[str, str]
    qkv: tuple[str, ...]
    by_groups: bool = False
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_OWN, _HF = "transformer.h.#.", "model.layers.#."
_ENDS = {"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"}
_NORMS = {f"{_OWN}norm_1": f"{_HF}input_layernorm", f"{_OWN}norm_2": f"{_HF}post_attention_layernorm"}
_PROJ = {f"{_OWN}attn.proj": f"{_HF}self_attn.o_proj"}
_HEAD_NORMS = {f"{_OWN}attn.norm_{each}": f"{_HF}self_attn.{each}_norm" for each in "qk"}
_LINEARS = {"fc_1": "gate_proj", "fc_2": "up_proj", "proj": "down_proj"}
_MLP = {f"{_OWN}mlp.{own}": f"{_HF}mlp.{hf}" for own, hf in _LINEARS.items()}
_LLAMA = {**_ENDS, **_NORMS, **_PROJ, **_MLP}
_GEMMA2 = {
    **_LLAMA,
    f"{_OWN}post_attention_norm": f"{_HF}post_attention_layernorm",
    f"{_OWN}norm_2": f"{_HF}pre_feedforward_layernorm",
    f"{_OWN}post_mlp_norm": f"{_HF}post_feedforward_layernorm",
}
_OLMO2 = {
    **_ENDS,
    **_PROJ,
    **_MLP,
    **_HEAD_NORMS,
    f"{_OWN}post_attention_norm": f"{_HF}post_attention_layernorm",
    f"{_OWN}post_mlp_norm": f"{_HF}post_feedforward_layernorm",
}
_EXPERTS = {f"{_OWN}mlp.experts.#.{own}": f"{_HF}mlp.experts.#.{hf}" for own, hf in _LINEARS.items()}
_MIXTRALS = {"fc_1": "w1", "fc_2": "w3", "proj": "w2"}
_MIXTRAL = {
    **_ENDS,
    **_NORMS,
    **_PROJ,
    f"{_OWN}mlp.gate": f"{_HF}block_sparse_moe.gate",
    **{f"{_OWN}mlp.experts.#.{own}": f"{_HF}block_sparse_moe.experts.#.{hf}" for own, hf in _MIXTRALS.items()},
}
_PHI = {
    **_ENDS,
    "transformer.ln_f": "model.final_layernorm",
    f"{_OWN}norm_1": f"{_HF}input_layernorm",
    f"{_OWN}attn.proj": f"{_HF}self_attn.dense",
    f"{_OWN}mlp.fc": f"{_HF}mlp.fc1",
    f"{_OWN}mlp.proj": f"{_HF}mlp.fc2",
}
_PHI3 = {**_ENDS, **_NORMS, **_PROJ, f"{_OWN}mlp.proj": f"{_HF}mlp.down_proj"}
_NEOX = "gpt_neox.layers.#."
_GPT_NEOX = {
    "transformer.wte": "gpt_neox.embed_in",
    "transformer.ln_f": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
    f"{_OWN}norm_1": f"{_NEOX}input_layernorm",
    f"{_OWN}norm_2": f"{_NEOX}post_attention_layernorm",
    f"{_OWN}attn.proj": f"{_NEOX}attention.dense",
    f"{_OWN}mlp.fc": f"{_NEOX}mlp.dense_h_to_4h",
    f"{_OWN}mlp.proj": f"{_NEOX}mlp.dense_4h_to_h",
}
_QKV = tuple(f"{_HF}self_attn.{each}_proj" for each in "qkv")

FAMILIES: Mapping[str, LitGptFamily] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma", "stablelm"), LitGptFamily(_LLAMA, _QKV)),
    "qwen3": LitGptFamily({**_LLAMA, **_HEAD_NORMS}, _QKV),
    "qwen3_moe": LitGptFamily(
        {**_ENDS, **_NORMS, **_PROJ, **_HEAD_NORMS, f"{_OWN}mlp.gate": f"{_HF}mlp.gate", **_EXPERTS}, _QKV
    ),
    "mixtral": LitGptFamily(_MIXTRAL, _QKV),
    "gemma2": LitGptFamily(_GEMMA2, _QKV),
    "gemma3_text": LitGptFamily({**_GEMMA2, **_HEAD_NORMS}, _QKV),
    "olmo2": LitGptFamily(_OLMO2, _QKV),
    "phi": LitGptFamily(_PHI, _QKV),
    "phi3": LitGptFamily(
        _PHI3,
        (f"{_HF}self_attn.qkv_proj",),
        joined={f"{_HF}mlp.gate_up_proj": (f"{_OWN}mlp.fc_1", f"{_OWN}mlp.fc_2")},
    ),
    "gpt_neox": LitGptFamily(_GPT_NEOX, (f"{_NEOX}attention.query_key_value",), by_groups=True),
}
"""By the `model_type` of Hugging Face's model."""
