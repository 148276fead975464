"""What the decoder's layers share: they add blocks to the residual stream, and forget activations where told to; most
have two blocks, one that mixes tokens, and an MLP or experts."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from precisionctl.model.model_shape import ModelShape
from precisionctl.trainer.backends.base import Backend, Norm
from precisionctl.trainer.model.attention.compressed_attention import CompressedAttention
from precisionctl.trainer.model.attention.kimi_k3_attention import KimiK3DeltaAttention, KimiK3LatentAttention
from precisionctl.trainer.model.attention.latent_attention import MLASelfAttention
from precisionctl.trainer.model.attention.self_attention import KeysValues, SelfAttention
from precisionctl.trainer.model.mlp import MLP, MoELayer
from precisionctl.trainer.model.positions import LayerKind, layer_kind
from precisionctl.trainer.model.recurrent.delta_nets import GatedDeltaNetAttention, KimiDeltaAttention
from precisionctl.trainer.model.recurrent.short_convolution import ShortConvolution
from precisionctl.trainer.sequences import Positions


class Beside(NamedTuple):
    """What a layer reads beside the residual stream."""

    per_layer: Tensor | None = None
    """What is made of the tokens for this layer alone, `[T, P]` (`Embedding.per_layer`)."""
    shared: KeysValues | None = None
    """The keys and values of another layer."""
    put_aside: tuple[Tensor, ...] = ()
    """The residual stream before each earlier layer that `puts_aside`, `[T, E]`."""


NOTHING = Beside()


class ResidualLayer(nn.Module):
    """A layer; `through` is what it computes. `recompute` keeps no activation for the backward but the input, and keys
    and values that other layers read."""

    puts_aside = False
    """Whether later layers also read the stream that it is given."""

    def __init__(self, model: ModelShape, number: int, backend: Backend, recompute: bool) -> None:
        super().__init__()
        self.backend, self.recompute = backend, recompute
        self.kind, self.residual_multiplier = layer_kind(model, number), model.residual_multiplier
        self._kv_is_read = any(model.kv_layer(layer) == number for layer in range(number + 1, model.num_layers))

    def forward(
        self, hidden: Tensor, positions: dict[LayerKind, Positions], beside: Beside = NOTHING
    ) -> tuple[Tensor, KeysValues | None]:
        """`[T, E]` to the same, and the keys and values that later layers read, if any do. Between regions of tensor
        ranks, T are those of this rank."""
        here = positions[self.kind]
        if self.recompute and torch.is_grad_enabled():
            made: tuple[Tensor, KeysValues | None] = self.backend.recomputed(self._computed, hidden, here, beside)
            return made
        return self._computed(hidden, here, beside)

    def _computed(self, hidden: Tensor, positions: Positions, beside: Beside) -> tuple[Tensor, KeysValues | None]:
        """What a layer recomputes: keys and values that no layer reads are gone before it ends."""
        out, kept = self.through(hidden, positions, beside)
        return out, kept if self._kv_is_read else None

    def through(self, hidden: Tensor, positions: Positions, beside: Beside) -> tuple[Tensor, KeysValues | None]:
        """What the layer computes, at the positions of its kind, and the keys and values that it made, if any."""
        raise NotImplementedError

    def added(self, hidden: Tensor, block: Tensor) -> Tensor:
        """The residual stream with what a block gives."""
        return torch.add(hidden, block, alpha=self.residual_multiplier)


TokenMixer = (
    SelfAttention
    | MLASelfAttention
    | CompressedAttention
    | KimiK3LatentAttention
    | GatedDeltaNetAttention
    | KimiDeltaAttention
    | KimiK3DeltaAttention
    | ShortConvolution
)
"""What a layer has for attention, or in its place."""


def token_mixer(name: str, model: ModelShape, number: int, backend: Backend) -> TokenMixer:
    """The attention of a layer, or what stands in its place."""
    of_kimi_k3 = model.attn_res_block_size is not None
    if model.csa:
        return CompressedAttention(name, model, model.csa, number, backend)
    if model.gdn and model.has_delta_net(number):
        if of_kimi_k3:
            return KimiK3DeltaAttention(name, model, model.gdn, backend)
        delta_net = KimiDeltaAttention if model.gdn.kda else GatedDeltaNetAttention
        return delta_net(name, model, model.gdn, backend)
    if model.short_conv and model.has_short_conv(number):
        return ShortConvolution(name, model, model.short_conv, backend)
    if model.mla and of_kimi_k3:
        return KimiK3LatentAttention(name, model, model.mla, backend)
    if model.mla:
        return MLASelfAttention(name, model, model.mla, number, backend)
    msa = model.msa if model.has_indexer(number) else None
    of_kind = model.attention_of(model.in_window(number))
    return SelfAttention(name, of_kind, backend, model.shares_kv(number), msa)


def mixed(
    mixer: TokenMixer, hidden: Tensor, positions: Positions, shared: KeysValues | None
) -> tuple[Tensor, KeysValues | None]:
    """What a mixer makes of `[T, E]`, and the keys and values that it read, of itself or `shared`, if it has any to
    share."""
    if isinstance(mixer, SelfAttention | MLASelfAttention):
        attended: tuple[Tensor, KeysValues] = mixer(hidden, positions, shared)
        return attended
    return mixer(hidden, positions), None


def mlp_or_experts(name: str, model: ModelShape, number: int, backend: Backend, norm: Norm | None) -> MLP | MoELayer:
    """The experts of a layer, or its MLP, whose first linear has the `norm` before it, if any."""
    if model.moe and model.has_experts(number):
        return MoELayer(name, model, model.moe, backend, hashed=model.is_hashed(number))
    return MLP(name, model, backend, model.ffn_size(number), norm)
