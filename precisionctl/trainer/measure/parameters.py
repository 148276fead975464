"""Numbers of parameters of a model, layer by layer, and of weights that a token is multiplied with: what the rows of
its family say."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from precisionctl.architectures.families import architecture_of
from precisionctl.architectures.param_map import Row
from precisionctl.model.model_shape import ModelShape
from precisionctl.recipe import ParallelSettings


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters: of each layer's dense part, of each layer's experts, and outside of layers (including
    multi-token prediction layers, which are not trained); of these, those of embedding and output layer."""

    dense: tuple[int, ...]
    experts: tuple[int, ...]
    outside: int
    vocabulary: int

    @staticmethod
    def of(model: ModelShape) -> "Parameters":
        """Count matrices; norms, biases, convolutions and gates of one row, a thousandth, are neglected."""
        dense, experts, outside = [0] * model.num_layers, [0] * model.num_layers, 0
        for row, size in _matrices(model):
            if row.of_prediction or "{layer}" not in row.megatron:
                outside += size * row.count(model)
                continue
            for place in row.in_each_layer(model):
                if row.of_experts and model.moe:
                    experts[place["layer"]] += size * model.moe.num_experts
                else:
                    dense[place["layer"]] += size
        vocabulary = model.hidden_size * model.padded_vocab_size * (2 - model.tied_embeddings)
        return Parameters(tuple(dense), tuple(experts), outside, vocabulary)

    @property
    def all(self) -> int:
        return sum(self.dense) + sum(self.experts) + self.outside

    def layers(self, parallel: ParallelSettings) -> list[int]:
        """The parameters of each layer that a rank has while the layer computes."""
        each = zip(self.dense, self.experts, strict=True)
        return [(dense + experts // parallel.expert) // parallel.tensor for dense, experts in each]


def _matrices(model: ModelShape) -> Iterator[tuple[Row, int]]:
    """The rows of matrices, each with the size of one."""
    for row in architecture_of(model.architecture).in_megatron(model):
        shape = row.shape(model)
        if len(shape) == 2 and shape[0] > 1:
            yield row, prod(shape)


def weights_used(model: ModelShape) -> int:
    """The number of weights that a token is multiplied with, as Megatron-LM counts them (`flops.py`): neither those of
    experts that it is not routed to, nor those of routers and of most indexers."""
    tied = model.hidden_size * model.padded_vocab_size if model.tied_embeddings else 0
    used = 0
    for row, size in _matrices(model):
        name = row.megatron
        if row.of_prediction or row.unused or _NO_LINEAR.search(name) or _NOT_COUNTED.search(name):
            continue
        if ".indexer." in name and not model.csa:
            continue
        in_layer = model.moe.topk if row.of_experts and model.moe else 1
        used += size * in_layer * sum(1 for _ in row.in_each_layer(model))
    return used + tied


_NO_LINEAR = re.compile(r"embeddings?\.weight$|\.ape$|\.A_log$")
"""Parameters that are looked up or added: no token is multiplied with them."""

_NOT_COUNTED = re.compile(r"\.router\.|hyper_connection|\.hc_head|\.altup\.")
"""Routers, and what joins a layer's blocks to residual streams."""


def largest_linear(model: ModelShape) -> int:
    """The number of weights of a layer's largest linear, or of one of its experts'."""
    in_layers = (each for each in _matrices(model) if "{layer}" in each[0].megatron)
    return max(size for row, size in in_layers if not _NO_LINEAR.search(row.megatron))


def compression(model: ModelShape, layer: int) -> int:
    """How many tokens a compressed key of a layer is made of; 0 where there are none."""
    return model.csa.RATIOS[model.csa.pattern[layer]] if model.csa else 0


def compressed_rows(model: ModelShape, layer: int) -> int:
    """Rows of each of the two linears that make compressed keys."""
    rows = {"W": 0, "C": model.overlapping_size, "H": model.kv_channels}
    return rows[model.csa.pattern[layer]] if model.csa else 0
