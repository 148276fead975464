"""Attention residuals (Kimi K3, arXiv 2607.24653): blocks read a mean of the residual stream and of what it was before
some earlier layers, by weights of a softmax. Parameter names are those of Megatron-Bridge's KimiK3TransformerLayer
(models/kimi/kimi_k3_layers.py).

Shape letters: T tokens, E hidden_size, N streams: those put aside, and the present one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from precisionctl.model.model_shape import ModelShape
from precisionctl.trainer.backends.base import Backend, norm_of, plain_linear
from precisionctl.trainer.model.layers.layer_blocks import mlp_or_experts, token_mixer
from precisionctl.trainer.model.layers.residual_layer import Beside, ResidualLayer
from precisionctl.trainer.sequences import Positions


class AttentionResidualLayer(ResidualLayer):
    """A layer of Kimi K3. Where a block of layers begins, the stream that it is given is put aside, and what attention
    gives is the new one. The last layer also makes the mean that the decoder's norm reads."""

    def __init__(self, name: str, model: ModelShape, number: int, backend: Backend, recompute: bool = False) -> None:
        super().__init__(model, number, backend, recompute)
        self.puts_aside = number % (model.attn_res_block_size or 1) == 0
        self.norm, size = norm_of(model), model.hidden_size
        self.input_layernorm = backend.norm(size, self.norm)
        self.self_attention = token_mixer(f"{name}.self_attention", model, number, backend)
        self.pre_mlp_layernorm = backend.norm(size, self.norm)
        self.mlp = mlp_or_experts(f"{name}.mlp", model, number, backend, None)
        last = ("output_attn",) if number == model.num_layers - 1 else ()
        for reader in ("self_attention", "mlp", *last):
            setattr(self, f"{reader}_res_norm", backend.norm(size, self.norm))
            setattr(self, f"{reader}_res_proj", plain_linear(size, 1, backend))
        self.is_last = bool(last)

    def through(self, hidden: Tensor, positions: Positions, beside: Beside) -> tuple[Tensor, None]:
        aside = beside.put_aside
        attended = self.self_attention(self.input_layernorm(self._mean("self_attention", (*aside, hidden))), positions)
        if self.puts_aside:
            aside, hidden = (*aside, hidden), attended
        else:
            hidden = hidden + attended
        hidden = hidden + self.mlp(self.pre_mlp_layernorm(self._mean("mlp", (*aside, hidden))))
        return self._mean("output_attn", (*aside, hidden)) if self.is_last else hidden, None

    def _mean(self, reader: str, streams: Sequence[Tensor]) -> Tensor:
        """Of streams `[T, E]`, N of them, what one of the readers reads, `[T, E]`, computed in FP32."""
        norm: Any = getattr(self, f"{reader}_res_norm")
        query: Any = getattr(self, f"{reader}_res_proj")
        wide = torch.stack(tuple(streams), 1).float()  # [T, N, E]
        weights = self.norm.multiplier(norm.weight) * query.weight.float()[0]
        scores = (wide * weights).sum(-1) * torch.rsqrt(wide.square().mean(-1) + self.norm.epsilon)
        mean: Tensor = (scores.softmax(-1)[..., None] * wide).sum(1)
        return mean.to(streams[-1].dtype)
