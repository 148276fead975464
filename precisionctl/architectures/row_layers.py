"""Which layers of a model have a row of its family's table."""

from collections.abc import Callable, Mapping
from typing import Literal

from precisionctl.model.model_shape import ModelShape

Layers = Literal[
    "all",
    "dense",
    "moe",
    "attention",
    "gdn",
    "conv",
    "mamba",
    "indexed",
    "windowed",
    "global",
    "rope",
    "nope",
    "sparse",
    "heavy",
    "hashed",
    "scored",
    "ngrams",
]
"""Which layers have a row:

- `all`: every layer
- `dense`, `moe`: those whose MLP is dense, or has experts
- `attention`, `gdn`, `conv`, `mamba`: those with softmax attention, a gated delta net, a short convolution, a Mamba
  mixer
- `indexed`: those with an indexer
- `windowed`, `global`: those whose attention has a window, or none
- `rope`, `nope`: those with rotary embeddings, or without
- `sparse`, `heavy`: those whose compressed keys overlap, or do not (CSA)
- `hashed`, `scored`: those with experts that a table chooses, or a router's scores
- `ngrams`: those with embeddings of n-grams
"""

COMPRESSED: Mapping[str, str] = {"sparse": "C", "heavy": "H"}
"""The letter in CSA's pattern of the layers that have a row with these `layers`."""

_BY_LAYER: Mapping[Layers, Callable[[ModelShape, int], bool]] = {
    "dense": ModelShape.has_dense_mlp,
    "moe": ModelShape.has_experts,
    "attention": ModelShape.has_attention,
    "gdn": ModelShape.has_delta_net,
    "conv": ModelShape.has_short_conv,
    "mamba": ModelShape.has_mixer,
    "indexed": ModelShape.has_indexer,
    "windowed": ModelShape.in_window,
    "global": lambda model, layer: not model.in_window(layer),
    "rope": ModelShape.has_rope,
    "nope": lambda model, layer: not model.has_rope(layer),
    "sparse": lambda model, layer: model.csa is not None and model.csa.pattern[layer] == COMPRESSED["sparse"],
    "heavy": lambda model, layer: model.csa is not None and model.csa.pattern[layer] == COMPRESSED["heavy"],
    "hashed": lambda model, layer: model.has_experts(layer) and model.is_hashed(layer),
    "scored": lambda model, layer: model.has_experts(layer) and not model.is_hashed(layer),
    "ngrams": ModelShape.has_ngrams,
}


def is_among(layers: Layers, model: ModelShape, layer: int) -> bool:
    """Whether a layer of a model is one of these `layers`."""
    return layers == "all" or _BY_LAYER[layers](model, layer)
