"""The two blocks that most layers have: one that mixes tokens, and an MLP or experts."""

from torch import Tensor

from precisionctl.model.model_shape import ModelShape
from precisionctl.trainer.backends.base import Backend, Norm
from precisionctl.trainer.model.attention.compressed_attention import CompressedAttention
from precisionctl.trainer.model.attention.kimi_k3_attention import KimiK3DeltaAttention, KimiK3LatentAttention
from precisionctl.trainer.model.attention.latent_attention import MLASelfAttention
from precisionctl.trainer.model.attention.self_attention import KeysValues, SelfAttention
from precisionctl.trainer.model.mlp import MLP, MoELayer
from precisionctl.trainer.model.recurrent.delta_nets import GatedDeltaNetAttention, KimiDeltaAttention
from precisionctl.trainer.model.recurrent.short_convolution import ShortConvolution
from precisionctl.trainer.sequences import Positions

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
    of_kind = model.of_layer(number)
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
        return MoELayer(name, model, model.moe, backend, number)
    return MLP(name, model, backend, model.ffn_size(number), norm, number)
