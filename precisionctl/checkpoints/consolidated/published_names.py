"""What tensors of consolidated files are called in published Hugging Face directories, and which of them are turned.

Sources: mistral-inference 1.6, transformer_layers.py, moe.py, vision_encoder.py; vLLM, model_executor/models/mistral.py
and mistral_large_3.py; transformers, models/mistral3/ and models/mistral4/ (convert_*_to_hf.py).

Trap: the two numbers of a rotary pair are in neighbouring rows of queries and keys, in Hugging Face in the two halves
of a head. Latent attention has its pairs side by side in both.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from precisionctl.architectures.config_keys import size
from precisionctl.architectures.wrappers import WRAPPERS
from precisionctl.checkpoints.other_trainers.name_patterns import pattern_of, with_numbers
from precisionctl.errors import DamagedCheckpoint
from precisionctl.model.model_shape import ModelShape

_LINEARS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_ATTENTION = {f"attention.w{each}": f"self_attn.{each}_proj" for each in "qkvo"}
_IN_LAYERS: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **_ATTENTION,
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "gate": "mlp.gate",
    "feed_forward.gate": "block_sparse_moe.gate",
    **{f"feed_forward.experts.#.{own}": f"block_sparse_moe.experts.#.{own}" for own in _LINEARS},
    **{f"feed_forward.{own}": f"mlp.{hf}" for own, hf in _LINEARS.items()},
    **{f"shared_experts.{own}": f"mlp.shared_experts.{hf}" for own, hf in _LINEARS.items()},
    **{f"experts.#.{own}": f"mlp.experts.#.{hf}" for own, hf in _LINEARS.items()},
}
_BODY: Mapping[str, str] = {
    "tok_embeddings": "embed_tokens",
    "norm": "norm",
    **{f"layers.#.{own}": f"layers.#.{hf}" for own, hf in _IN_LAYERS.items()},
}
_HEAD = "output"

_OF_ENCODER = "vision_encoder.transformer.layers.#."
_TOWERS: Mapping[str, str] = {
    "vision_encoder.ln_pre": "vision_tower.ln_pre",
    "vision_encoder.patch_conv": "vision_tower.patch_conv",
    **{f"{_OF_ENCODER}{norm}": f"vision_tower.transformer.layers.#.{norm}" for norm in ("attention_norm", "ffn_norm")},
    **{
        f"{_OF_ENCODER}attention.w{each}": f"vision_tower.transformer.layers.#.attention.{each}_proj" for each in "qkvo"
    },
    **{
        f"{_OF_ENCODER}feed_forward.{own}": f"vision_tower.transformer.layers.#.feed_forward.{hf}"
        for own, hf in _LINEARS.items()
    },
    "vision_language_adapter.w_in": "multi_modal_projector.linear_1",
    "vision_language_adapter.w_out": "multi_modal_projector.linear_2",
    "patch_merger.merging_layer": "multi_modal_projector.patch_merger.merging_layer",
    "pre_mm_projector_norm": "multi_modal_projector.norm",
}
_SCALES = {"qscale_weight": "weight_scale_inv", "qscale_act": "activation_scale"}
"""Kinds of tensors that Mistral has words of its own for, and transformers' for `quant_method: fp8`."""

_TURNED = re.compile(r"(vision_encoder\.transformer\.)?layers\.\d+\.attention\.w([qk])")

LEFT = re.compile(
    r"(?:layers\.\d+\.attention\.inner_attention\.)?rope\.freqs|layers\.\d+\.attention\.(?:q|k|v|kv)_fake_quantizer\.qscale_act"
)
"""Buffers that make no part of a model: the frequencies of the first Llamas, which follow from `rope_theta`, and scales
of a KV cache."""


@dataclass(frozen=True)
class RotaryHeads:
    """Rows of queries or keys: this many heads of a size."""

    count: int
    size: int


class PublishedNames:
    """The names of a model's tensors. `vision` is the config of a wrapper's tower; None of a text model alone."""

    def __init__(self, model: ModelShape, vision: Mapping[str, object] | None) -> None:
        self._wrapper = WRAPPERS["mistral3"] if vision is not None else None
        queries = RotaryHeads(model.num_attention_heads, model.kv_channels)
        self._heads = {(False, "q"): queries, (False, "k"): RotaryHeads(model.num_query_groups, model.kv_channels)}
        if vision is not None:
            heads = size(vision, "num_attention_heads")
            of_tower = RotaryHeads(heads, size(vision, "hidden_size") // heads)
            self._heads |= {(True, "q"): of_tower, (True, "k"): of_tower}
        if odd := [each.size for each in self._heads.values() if each.size % 2]:
            raise DamagedCheckpoint(f"heads of {odd[0]} rows: rotary embeddings turn pairs of them")

    def of(self, name: str) -> str | None:
        """The published name of a tensor; None for one that no such model has."""
        module, _, kind = name.rpartition(".")
        pattern, numbers = pattern_of(module)
        if pattern == _HEAD:
            found = self._wrapper.head if self._wrapper else "lm_head."
        elif pattern in _BODY:
            found = f"{self._wrapper.body if self._wrapper else 'model.'}{_BODY[pattern]}."
        elif self._wrapper and pattern in _TOWERS:
            found = f"{_TOWERS[pattern]}."
        else:
            return None
        return f"{with_numbers(found, numbers)}{_SCALES.get(kind, kind)}"

    def heads(self, name: str) -> RotaryHeads | None:
        """The heads whose rows stand in another order in a tensor than in the published one; None of any other."""
        match = _TURNED.match(name)
        if match is None or name[match.end()] != ".":
            return None
        return self._heads.get((match[1] is not None, match[2]))
