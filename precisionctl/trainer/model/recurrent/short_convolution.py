"""A short gated convolution in the place of attention (LFM2). Megatron-Core has none; its parameters have a gated
delta net's names.

Shape letters: B batch, S sequence, T tokens, E hidden_size.
"""

import torch
from torch import Tensor, nn

from precisionctl.model.model_shape import ModelShape
from precisionctl.model.recurrent_parts import ShortConv
from precisionctl.trainer.backends.base import Backend, column_linear, norm_of
from precisionctl.trainer.model.recurrent.recurrence import by_text, convolution, convolved
from precisionctl.trainer.sequences import Positions


class ShortConvolution(nn.Module):
    """Rows of in_proj: the gate before the convolution, the gate behind it, and what it reads. Gates are factors, with
    no activation. A tensor rank has some of the channels, of each."""

    def __init__(self, name: str, model: ModelShape, short_conv: ShortConv, backend: Backend) -> None:
        super().__init__()
        hidden = model.hidden_size
        self.in_proj = column_linear(backend, f"{name}.in_proj", hidden, model.short_conv_size, False, norm_of(model))
        self.conv1d = convolution(hidden, short_conv.kernel_dim, backend)
        self.out_proj = backend.linear(f"{name}.out_proj", hidden, hidden, False, "row")

    def forward(self, hidden: Tensor, positions: Positions) -> Tensor:
        """`[T, E]` to the same."""
        out: Tensor = self.out_proj(by_text(self._convolve, self.in_proj(hidden), positions))
        return out

    def _convolve(self, projected: Tensor) -> Tensor:
        """What in_proj gives of texts that are S tokens long, `[B, S, 3 E]`, to `[B, S, E]`."""
        before, behind, read = torch.chunk(projected, 3, -1)
        return behind * convolved(before * read, self.conv1d)
