"""Several residual streams of which each channel has a weight to read it by (Qwen4-Exp), as transformers computes them
(modeling_qwen4_exp.py, Qwen4ExpTextGatedResidual).

Shape letters: T tokens, N residual streams, E hidden_size.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model.model_parts import HyperConnections
from precisionctl.model.model_shape import ModelShape
from precisionctl.trainer.backends.base import Backend, norm_of, plain_linear
from precisionctl.trainer.backends.bf16_products import product
from precisionctl.trainer.model.norms import NormOfStreams


class GatedResidual(nn.Module):
    """What joins a block to the residual streams. One that `adds` nothing makes a stream of them all, behind the last
    layer. Every tensor rank has all of it."""

    def __init__(self, model: ModelShape, mhc: HyperConnections, backend: Backend, adds: bool = True) -> None:
        super().__init__()
        self.streams, self.magnitude = mhc.num_residual_streams, mhc.magnitude
        assert mhc.lowrank, "others have a `HyperConnection`"
        self.hc_norm = NormOfStreams(self.streams, model.hidden_size, norm_of(model), backend)
        self.input_mix_weight_down = plain_linear(model.streams_size, mhc.lowrank, backend)
        self.input_mix_weight_up = plain_linear(mhc.lowrank, model.streams_size, backend)
        self.block_inject_weight = plain_linear(model.streams_size, self.streams, backend) if adds else None

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, None]:
        """Streams `[T, N, E]` to what a block reads, `[T, E]`, and FP32 weights to add by, `[T, N]`, 1 where nothing is
        added; streams are not mixed."""
        normed = self.hc_norm(streams)
        wide = normed.flatten(1)
        inner = F.silu(product(F.linear, wide, self.input_mix_weight_down.weight) / self.streams)
        weights = product(F.linear, inner, self.input_mix_weight_up.weight).float().sigmoid()
        read = (weights.view_as(normed) * normed).mean(1).to(streams.dtype)
        if self.block_inject_weight is None:
            return read, read.new_ones(()), None
        add = product(F.linear, wide, self.block_inject_weight.weight).float() / self.streams
        return read, self.magnitude * add.sigmoid(), None
