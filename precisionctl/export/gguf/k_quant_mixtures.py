"""Which type each tensor of a file of K-quants has: the mixtures of llama-quantize, without importance matrix.

Most matrices have the type that a mixture is named after. Output layers, and values and down projections of some
layers, have more bits, as far as name, layer and counts say so.

Source: llama.cpp's src/llama-quant.cpp (tensor_allows_quantization, tensor_get_category, llama_tensor_get_type_impl,
tensor_type_fallback) and src/llama-model-loader.h (weight_name_comparer).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from precisionctl.checkpoints.gguf.file_types import IN_FEWER_VALUES, Mixture
from precisionctl.checkpoints.gguf.metadata_bytes import Metadata
from precisionctl.checkpoints.gguf.writer import layer_and_name
from precisionctl.codes.ggml_formats import named

_KEPT = re.compile(
    r"_norm\.weight|ffn_gate_inp\.weight|^position_embd\.|per_layer_model_proj|altup|laurel|ssm_conv1d"
    r"|shortconv\.conv\.weight"
)
"""Matrices that stay what they are, by a part of their names. What llama.cpp keeps of families that are not written, is
not here."""

_CATEGORIES = {
    "output": re.compile(r"output\.weight"),
    "embedding": re.compile(r"(per_layer_)?token_embd\.weight"),
    "values": re.compile(r".*attn_(qkv|kv_b|v)\.weight"),
    "keys": re.compile(r".*attn_k\.weight"),
    "attention output": re.compile(r".*attn_output\.weight"),
    "down": re.compile(r".*ffn_down.*"),
}
"""What tensors are, by their names, as far as a mixture asks for it."""


def types_in_mixture(mixture: Mixture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The names of the types of those tensors that become codes, or F16 where rows have no whole blocks, of all
    tensors' `shapes` in a file with such `metadata`."""
    model, usual = _Model.of(metadata), mixture.upper()[:4]
    found = dict[str, str]()
    categories = {
        name: next((category for category, names in _CATEGORIES.items() if names.fullmatch(name)), None)
        for name in shapes
    }
    values = list(categories.values()).count("values")
    tied, value, down = "output.weight" not in shapes, 0, 0
    for name in sorted(shapes, key=layer_and_name):
        is_vector = all(size == 1 for size in shapes[name][:-1])
        if is_vector or not name.endswith("weight") or _KEPT.search(name):
            continue
        category, columns, type_ = categories[name], shapes[name][-1], usual
        if category == "output" or category == "embedding" and tied:
            type_ = "Q8_0" if model.is_falcon or columns % named(usual).values else "Q6_K"
        elif category == "values":
            type_ = model.of_values(mixture, usual, value, values)
            value += 1
        elif category == "keys" and model.experts == 8:
            type_ = "Q8_0"
        elif category == "down":
            type_ = model.of_down(mixture, usual, layer_and_name(name)[0] if model.experts > 1 else down)
            down += 1
        elif category == "attention output" and model.experts == 8 and not model.is_falcon and usual == "Q4_K":
            type_ = "Q5_K"
        if columns % named(type_).values:
            type_ = IN_FEWER_VALUES.get(type_, type_)
        found[name] = "F16" if columns % named(type_).values else type_
    return found


@dataclass(frozen=True)
class _Model:
    """What a mixture asks of a model. `layers` are those of prediction, too."""

    is_falcon: bool
    is_70b: bool
    experts: int
    layers: int

    @classmethod
    def of(cls, metadata: Metadata) -> _Model:
        architecture = metadata["general.architecture"]

        def said(key: str, otherwise: Any = 0) -> Any:
            return metadata.get(f"{architecture}.{key}", otherwise)

        layers, heads = int(said("block_count")), said("attention.head_count")
        is_70b = layers - said("nextn_predict_layers") == _LAYERS_OF_70B.get(str(architecture))
        if architecture == "llama":
            is_70b = is_70b and said("attention.head_count_kv", heads) != heads
        return cls(architecture == "falcon", bool(is_70b), int(said("expert_count")), layers)

    def of_values(self, mixture: Mixture, usual: str, number: int, of: int) -> str:
        """The type of the values' projection, with those of queries and keys where they are one."""
        type_ = usual
        if mixture.endswith("_m") and _more_bits(number, of):
            type_ = "Q6_K"
        elif mixture == "q4_k_s" and number < 4:
            type_ = "Q5_K"
        if self.is_70b and type_ == "Q4_K":
            type_ = "Q5_K"
        return "Q8_0" if self.experts == 8 else type_

    def of_down(self, mixture: Mixture, usual: str, layer: int) -> str:
        more = _more_bits(layer, self.layers)
        if mixture == "q4_k_m" and self.is_falcon:
            return "Q6_K" if layer < self.layers // 16 else "Q5_K" if more else usual
        if mixture.endswith("_m") and more:
            return "Q6_K"
        if mixture == "q4_k_s" and not self.is_falcon and layer < self.layers // 8:
            return "Q5_K"
        return usual


_LAYERS_OF_70B = {"llama": 80, "qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}
"""The numbers of layers by which llama.cpp takes a model for one of 70B parameters; a Llama with groups of heads."""


def _more_bits(layer: int, layers: int) -> bool:
    """Whether a layer is one of the first or last eighth, or a third one between them."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
