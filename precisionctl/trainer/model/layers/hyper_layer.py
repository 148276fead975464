"""A layer between several residual streams, as Megatron-Core's HyperConnectionTransformerLayer."""

import torch
from torch import Tensor, nn

from precisionctl.model.model_parts import HyperConnections
from precisionctl.model.model_shape import ModelShape
from precisionctl.trainer.backends.base import Backend, norm_of
from precisionctl.trainer.model.attention.compressed_attention import CompressedAttention
from precisionctl.trainer.model.attention.latent_attention import MLASelfAttention
from precisionctl.trainer.model.attention.self_attention import KeysValues, SelfAttention
from precisionctl.trainer.model.layers.gated_residual import GatedResidual
from precisionctl.trainer.model.layers.hyper_connections import HyperConnection, add_head, added
from precisionctl.trainer.model.layers.residual_layer import Beside, ResidualLayer
from precisionctl.trainer.model.linears import plain_linear
from precisionctl.trainer.model.mlp import MLP, MoELayer
from precisionctl.trainer.model.ngram_embedding import NgramLayer
from precisionctl.trainer.model.recurrent.gated_delta_net import GatedDeltaNetAttention
from precisionctl.trainer.model.recurrent.kimi_delta_attention import KimiDeltaAttention
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
        norm, moe = norm_of(model), model.moe if model.has_experts(number) else None
        self.streams = mhc.num_residual_streams
        connection = GatedResidual if mhc.lowrank else HyperConnection
        self.ple: NgramLayer | None = None
        if model.ple and model.has_ngrams(number):
            self.ple = NgramLayer(model, model.ple, mhc, number, backend)
        self.self_attention_hyper_connection = connection(model, mhc, backend)
        self.input_layernorm = backend.norm(model.hidden_size, norm) if model.pre_layernorms else nn.Identity()
        self.self_attention: (
            CompressedAttention | GatedDeltaNetAttention | KimiDeltaAttention | MLASelfAttention | SelfAttention
        )
        if model.csa:
            self.self_attention = CompressedAttention(f"{name}.self_attention", model, model.csa, number, backend)
        elif model.gdn and model.has_delta_net(number):
            delta_net = KimiDeltaAttention if model.gdn.kda else GatedDeltaNetAttention
            self.self_attention = delta_net(f"{name}.self_attention", model, model.gdn, backend)
        elif model.mla:
            self.self_attention = MLASelfAttention(f"{name}.self_attention", model, model.mla, number, backend)
        else:
            msa = model.msa if model.has_indexer(number) else None
            self.self_attention = SelfAttention(f"{name}.self_attention", model, backend, msa=msa)
        self.mlp_hyper_connection = connection(model, mhc, backend)
        own_norm = moe and model.pre_layernorms
        self.pre_mlp_layernorm = backend.norm(model.hidden_size, norm) if own_norm else nn.Identity()
        self.mlp: MLP | MoELayer
        if moe:
            self.mlp = MoELayer(f"{name}.mlp", model, moe, backend, hashed=model.is_hashed(number))
        else:
            fused = norm if model.fused_layernorms else None
            self.mlp = MLP(f"{name}.mlp", model, backend, model.ffn_hidden_size, fused)

    def through(self, hidden: Tensor, positions: Positions, beside: Beside) -> tuple[Tensor, KeysValues | None]:
        streams = torch.unflatten(hidden, -1, (self.streams, -1))
        if self.ple is not None:
            streams = streams + self.ple(streams, positions)
        read, add, mix = self.self_attention_hyper_connection(streams)
        normed, kept = self.input_layernorm(read), None
        if isinstance(self.self_attention, MLASelfAttention | SelfAttention):
            attended, kept = self.self_attention(normed, positions, beside.shared)
        else:
            attended = self.self_attention(normed, positions)
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
