"""Numbers of parameters of a model, layer by layer."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from precisionctl.model.model_shape import ModelShape
from precisionctl.recipe import ParallelSettings
from precisionctl.trainer.measure.linear_weights import (
    beside_experts,
    compressed_rows,
    compression,
    connections,
    indexer,
    mlp,
    mlp_used,
    ngram_projections,
    norm_gates,
    per_layer_input,
    projections,
)


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters: of each layer's dense part, of each layer's experts, and outside of layers (including
    multi-token prediction layers, which are not trained)."""

    dense: tuple[int, ...]
    experts: tuple[int, ...]
    outside: int

    @staticmethod
    def of(model: ModelShape) -> "Parameters":
        """Count linears, embedding and output layer; norms, biases and convolutions, a thousandth, are neglected."""
        layers, moe = range(model.num_layers), model.moe
        table = model.hidden_size * model.padded_vocab_size
        places = model.hidden_size * model.position_rows if model.learned_positions else 0

        def dense(layer: int) -> int:
            attention = projections(model, layer)
            if model.has_indexer(layer) and not model.csa:  # whose is among its projections
                attention += indexer(model)
            if model.stores_unused and model.shares_kv(layer):
                attention += model.hidden_size * model.attention_of(model.in_window(layer)).key_value_size
            attention += per_layer_input(model) + connections(model) + _tables(model, layer)
            attention += norm_gates(model, layer) + ngram_projections(model, layer)
            if moe is None or not model.has_experts(layer):
                return attention + mlp_used(model, layer)
            return attention + beside_experts(moe, model) + moe.num_experts * model.hidden_size

        def experts(layer: int) -> int:
            if moe is None or not model.has_experts(layer):
                return 0
            return moe.num_experts * mlp(model, moe.ffn_hidden_size, model.expert_hidden_size)

        ahead = 0
        if model.mtp_num_layers:
            alike = Parameters.of(replace(model.of_prediction, mtp_num_layers=0))
            joining = model.doubled_hidden_size * model.hidden_size + _head(model.of_prediction)
            blocks = slice(None if model.mamba else -1, None)
            ahead = model.mtp_num_layers * (sum(alike.dense[blocks]) + sum(alike.experts[blocks]) + joining)
        per_layer = (model.padded_vocab_size + model.hidden_size) * model.per_layer_embed_size
        outside = table * (2 - model.tied_embeddings) + places + per_layer + ahead + _head(model)
        return Parameters(tuple(map(dense, layers)), tuple(map(experts, layers)), outside)

    @property
    def all(self) -> int:
        return sum(self.dense) + sum(self.experts) + self.outside

    def layers(self, parallel: ParallelSettings) -> list[int]:
        """The parameters of each layer that a rank has while the layer computes."""
        each = zip(self.dense, self.experts, strict=True)
        return [(dense + experts // parallel.expert) // parallel.tensor for dense, experts in each]


def _tables(model: ModelShape, layer: int) -> int:
    """Numbers that are no linear's: the experts of each token, embeddings of n-grams, what is added to the tokens of a
    window or pool, and rates by which the states of a Mamba-1 mixer decay."""
    if model.mamba and model.mamba.dt_rank is not None and model.has_mixer(layer):
        return model.mamba.inner_size * model.mamba.state_dim
    if model.ple and model.has_ngrams(layer):
        return model.ple.table_rows(layer) * model.ple.head_dim
    hashed = model.vocab_size * model.moe.topk if model.moe and model.is_hashed(layer) else 0
    rows = compressed_rows(model, layer)
    if model.csa and model.has_indexer(layer):
        rows += model.csa.overlapping_size
    pooled = (model.dsa.kpool or 0) * model.dsa.head_dim if model.dsa and model.has_indexer(layer) else 0
    return hashed + compression(model, layer) * rows + pooled


def _head(model: ModelShape) -> int:
    """Weights by which one of the residual streams is made."""
    if model.mhc is None or model.mhc.mean_head:
        return 0
    return model.streams_size * (2 * model.mhc.lowrank if model.mhc.lowrank else model.mhc.num_residual_streams)


def tensor_sizes(model: ModelShape) -> Iterator[int]:
    """Sizes of the larger linears' weights."""
    of_attention = (size for each in model.attentions for size in (each.qkv_size, each.projection_size))
    yield model.hidden_size * max(model.fc1_size, model.kv_shared_fc1_size, *of_attention)
    yield model.hidden_size * max(model.expert_fc1_size, model.shared_fc1_size)
    yield from (model.hidden_size * each.in_proj_size for each in (model.gdn, model.mamba) if each)
    yield model.hidden_size * model.short_conv_size if model.short_conv else 0
