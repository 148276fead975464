"""What MaxText calls the parameters of its families, and Hugging Face.

The names, and what MaxText has multiplied into weights or added to them, are those of its own converter
(`checkpoint_conversion/utils/param_mapping.py`, of 22 August 2026); Llama 2, Llama 3 and Mistral are in
`standalone_scripts/llama_mistral_mixtral_orbax_to_hf.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from precisionctl.model.model_shape import ModelShape


@dataclass(frozen=True)
class MaxTextFamily:
    """A family in MaxText.

    `names` are the parameters inside a layer, with Hugging Face's name; `{expert}` is its number where Hugging Face has
    a tensor for each, which are dimension 0 in MaxText. Layers repeat in a pattern of `block`, each place of which is a
    stack of its own. Of Gemma 2 both places are in one layer of MaxText's, under names that end in `_local` and
    `_global` (`twins`).

    MaxText has queries divided by the root of the size of a head (`scaled_queries`), norms plus one (`norms_plus_one`),
    and embeddings times the root of their width (`scaled_embeddings`), which may be rounded to BF16 (`rounded_scale`).
    With the rotary scaling `pairs_by`, which is its Llama 3.1's, it has the two numbers of a rotary pair beside each
    other in queries and keys.
    """

    names: Mapping[str, str]
    block: int = 1
    twins: bool = False
    scaled_queries: bool = False
    norms_plus_one: bool = False
    scaled_embeddings: bool = False
    rounded_scale: bool = False
    pairs_by: str | None = None


_ATTENTION = {
    **{f"self_attention.{kind}.kernel": f"self_attn.{kind[0]}_proj.weight" for kind in ("query", "key", "value")},
    "self_attention.out.kernel": "self_attn.o_proj.weight",
}
_BIASES = {f"self_attention.{kind}.bias": f"self_attn.{kind[0]}_proj.bias" for kind in ("query", "key", "value")}
_HEAD_NORMS = {f"self_attention.{kind}_norm.scale": f"self_attn.{kind[0]}_norm.weight" for kind in ("query", "key")}
_NORMS = {
    "pre_self_attention_layer_norm.scale": "input_layernorm.weight",
    "post_self_attention_layer_norm.scale": "post_attention_layernorm.weight",
}
_PROJECTIONS = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
_MLP = {f"mlp.{name}.kernel": f"mlp.{hf}.weight" for name, hf in _PROJECTIONS.items()}
_LLAMA = {**_ATTENTION, **_NORMS, **_MLP}


def _experts(block: str, hf: str = "mlp.experts.{expert}.", names: Mapping[str, str] = _PROJECTIONS) -> dict[str, str]:
    return {f"{block}.{name}": f"{hf}{projection}.weight" for name, projection in names.items()}


_MIXTRAL_EXPERTS = {
    "MoeBlock_0.gate.kernel": "block_sparse_moe.gate.weight",
    **_experts("MoeBlock_0", "block_sparse_moe.experts.{expert}.", {"wi_0": "w1", "wi_1": "w3", "wo": "w2"}),
}
_GEMMA_NORMS = {
    "pre_self_attention_norm.scale": "input_layernorm.weight",
    "post_self_attention_norm.scale": "post_attention_layernorm.weight",
    "pre_ffw_norm.scale": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.scale": "post_feedforward_layernorm.weight",
}
_LATENT_ATTENTION = {
    "self_attention.query.kernel": "self_attn.q_proj.weight",
    "self_attention.wq_a.kernel": "self_attn.q_a_proj.weight",
    "self_attention.q_norm.scale": "self_attn.q_a_layernorm.weight",
    "self_attention.wq_b.kernel": "self_attn.q_b_proj.weight",
    "self_attention.wkv_a.kernel": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.kv_norm.scale": "self_attn.kv_a_layernorm.weight",
    "self_attention.wkv_b.kernel": "self_attn.kv_b_proj.weight",
    "self_attention.out.kernel": "self_attn.o_proj.weight",
}
_DEEPSEEK_EXPERTS = {
    "DeepSeekMoeBlock_0.MoeBlock_0.gate.kernel": "mlp.gate.weight",
    "DeepSeekMoeBlock_0.MoeBlock_0.gate.bias": "mlp.gate.e_score_correction_bias",
    **_experts("DeepSeekMoeBlock_0.MoeBlock_0"),
    **{
        f"DeepSeekMoeBlock_0.shared_experts.{name}.kernel": f"mlp.shared_experts.{hf}.weight"
        for name, hf in _PROJECTIONS.items()
    },
}
_GEMMA = MaxTextFamily(
    {**_ATTENTION, **_MLP, **_GEMMA_NORMS}, norms_plus_one=True, scaled_embeddings=True, scaled_queries=True, twins=True
)
_DEEPSEEK = MaxTextFamily({**_LATENT_ATTENTION, **_NORMS, **_MLP, **_DEEPSEEK_EXPERTS})

FAMILIES: Mapping[str, MaxTextFamily] = {
    "llama": MaxTextFamily(_LLAMA, scaled_queries=True, pairs_by="llama3"),
    "mistral": MaxTextFamily(_LLAMA, scaled_queries=True),
    "mixtral": MaxTextFamily({**_ATTENTION, **_NORMS, **_MIXTRAL_EXPERTS}, scaled_queries=True),
    "qwen2": MaxTextFamily({**_LLAMA, **_BIASES}),
    "qwen3": MaxTextFamily({**_LLAMA, **_HEAD_NORMS}),
    "qwen3_moe": MaxTextFamily(
        {
            **_ATTENTION,
            **_HEAD_NORMS,
            **_NORMS,
            "moe_block.gate.kernel": "mlp.gate.weight",
            **_experts("moe_block"),
        }
    ),
    "gemma2": _GEMMA,
    "gemma3_text": replace(
        _GEMMA,
        names={**_GEMMA.names, **_HEAD_NORMS},
        scaled_queries=False,
        twins=False,
        block=6,
        rounded_scale=True,
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "olmo3": MaxTextFamily(
        {
            **{name.replace("self_attention", "attention"): hf for name, hf in (_ATTENTION | _HEAD_NORMS).items()},
            **_MLP,
            "post_self_attention_layer_norm.scale": "post_attention_layernorm.weight",
            "post_mlp_layer_norm.scale": "post_feedforward_layernorm.weight",
        },
        block=4,
    ),
}
"""By the `model_type` of Hugging Face's model."""

EMBEDDING, HEAD = "token_embedder.embedding", "decoder.logits_dense.kernel"
_ENDS = {
    EMBEDDING: "model.embed_tokens.weight",
    "decoder.decoder_norm.scale": "model.norm.weight",
    HEAD: "lm_head.weight",
}
_IN_LAYERS = re.compile(
    r"decoder\.(?:(?P<of>dense_|moe_)?layers(?:_(?P<layer>\d{1,9}))?(?:\.layers_(?P<place>\d{1,9}))?"
    r"|layers_remainder\.layers_(?P<left>\d{1,9}))\.(?P<inside>.+)"
)


@dataclass(frozen=True)
class ParameterPlace:
    """Where Hugging Face has a parameter: as `hf`, with the number of the layer in it, and of the expert. `layers` are
    those that the parameter is a stack of, in the stack's order; None where it is no stack."""

    hf: str
    inside: str
    layers: Sequence[int] | None

    def names(self, experts: int) -> Iterator[tuple[str, int | None, int | None]]:
        """Yield Hugging Face's names, each with the places in the stack of layers and among the experts."""
        of_experts = range(experts) if "{expert}" in self.hf else (None,)
        for at, layer in enumerate(self.layers) if self.layers is not None else ((None, None),):
            for expert in of_experts:
                yield self.hf.format(layer=layer, expert=expert), at, expert


def placed(name: str, family: MaxTextFamily, model: ModelShape) -> ParameterPlace | None:
    """Where Hugging Face has a parameter of a model; None for one that MaxText's converter does not know."""
    if hf := _ENDS.get(name):
        return ParameterPlace(hf, name, None)
    if (match := _IN_LAYERS.fullmatch(name)) is None:
        return None
    inside, first, apart = match["inside"], int(match["place"] or 0), family.block
    if family.twins:
        module, _, rest = inside.partition(".")
        module, _, twin = module.rpartition("_")
        inside, first, apart = f"{module}.{rest}", _TWINS.get(twin, -1), len(_TWINS)
    hf = family.names.get(inside)
    if hf is None or first not in range(apart):
        return None
    layers = list(range(model.num_layers))
    if match["of"]:
        has_experts = model.moe.layer_freq if model.moe else (False,) * model.num_layers
        layers = [layer for layer in layers if has_experts[layer] == (match["of"] == "moe_")]
    in_blocks = len(layers) // apart * apart
    if match["layer"] is None and match["left"] is None:
        stack = layers[first:in_blocks:apart]
        as_written = (match["place"] is not None) == (family.block > 1)
        return ParameterPlace("model.layers.{layer}." + hf, inside, stack) if stack and as_written else None
    if match["left"] is not None:
        number = in_blocks + int(match["left"])
    else:
        number = first + int(match["layer"]) * (apart if family.twins else 1)
    if number >= len(layers) or match["place"] is not None:
        return None
    return ParameterPlace(f"model.layers.{layers[number]}.{hf}", inside, None)


_TWINS = {"local": 0, "global": 1}
