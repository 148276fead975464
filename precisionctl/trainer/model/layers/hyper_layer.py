"""A layer between several residual streams, as Megatron-Core's HyperConnectionTransformerLayer."""

import torch
from torch import Tensor, nn

from precisionctl.model.model_parts import HyperConnections
from precisionctl.model.model_shape import ModelShape
from precisionctl.trainer.backends.base import Backend, norm_of, plain_linear
from precisionctl.trainer.model.attention.self_attention import KeysValues
from precisionctl.trainer.model.layers.gated_residual import GatedResidual
from precisionctl.trainer.model.layers.hyper_connections import HyperConnection, add_head, added
from precisionctl.trainer.model.layers.layer_blocks import mixed, mlp_or_experts, token_mixer
from precisionctl.trainer.model.layers.residual_layer import Beside, ResidualLayer
from precisionctl.trainer.model.mlp import MoELayer
from precisionctl.trainer.model.ngram_embedding import NgramLayer
from precisionctl.trainer.sequences import Positions


class HyperLayer(ResidualLayer):
    """Attention, a gated delta net or Kimi delta attention, and experts or an MLP, whose norm lives in it, each between
    the streams. Hidden states are `[T, N * E]`. There are no norms where connections normalise the streams. Embeddings
    of n-grams are added first."""

    def __init__(
        self,
        name: str,
        model: ModelShape,
        mhc: HyperConnections,
        number: int,
        backend: Backend,
        recompute: bool = False,
    ) -> None:
        super().__init__(model, number, backend, recompute)
        norm, self.streams = norm_of(model), mhc.num_residual_streams
        connection = GatedResidual if mhc.lowrank else HyperConnection
        self.ple: NgramLayer | None = None
        if model.ple and model.has_ngrams(number):
            self.ple = NgramLayer(model, model.ple, mhc, number, backend)
        self.self_attention_hyper_connection = connection(model, mhc, backend)
        self.input_layernorm = backend.norm(model.hidden_size, norm) if model.pre_layernorms else nn.Identity()
        self.self_attention = token_mixer(f"{name}.self_attention", model, number, backend)
        self.mlp_hyper_connection = connection(model, mhc, backend)
        own_norm = model.has_experts(number) and model.pre_layernorms
        self.pre_mlp_layernorm = backend.norm(model.hidden_size, norm) if own_norm else nn.Identity()
        fused = norm if model.fused_layernorms else None
        self.mlp = mlp_or_experts(f"{name}.mlp", model, number, backend, fused)

    def through(self, hidden: Tensor, positions: Positions, beside: Beside) -> tuple[Tensor, KeysValues | None]:
        streams = torch.unflatten(hidden, -1, (self.streams, -1))
        if self.ple is not None:
            streams = streams + self.ple(streams, positions)
        read, add, mix = self.self_attention_hyper_connection(streams)
        attended, kept = mixed(self.self_attention, self.input_layernorm(read), positions, beside.shared)
        hidden = added(streams, attended, add, mix)
        streams = torch.unflatten(hidden, -1, (self.streams, -1))
        read, add, mix = self.mlp_hyper_connection(streams)
        normed = self.pre_mlp_layernorm(read)
        made = self.mlp(normed, positions.tokens) if isinstance(self.mlp, MoELayer) else self.mlp(normed)
        return added(streams, made, add, mix), kept


class HyperMTPLayer(nn.Module):
    """The parameters of a layer of multi-token prediction between streams, which are carried along and not trained."""

    def __init__(self, model: ModelShape, backend: Backend) -> None:
        super().__init__()
        norm, size, mhc = norm_of(model), model.hidden_size, model.mhc
        assert mhc, "others have one of `MTPLayer`"
        self.enorm, self.hnorm = backend.norm(size, norm), backend.norm(size, norm)
        self.e_proj, self.h_proj = plain_linear(size, size, backend), plain_linear(size, size, backend)
        last = model.num_layers - 1
        self.transformer_layer = HyperLayer("mtp.transformer_layer", model.of_prediction, mhc, last, backend)
        self.final_layernorm = backend.norm(size, norm)
        add_head(self, model, mhc, backend)
