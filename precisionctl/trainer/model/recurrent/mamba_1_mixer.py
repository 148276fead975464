"""A Mamba-1 mixer (arXiv 2312.00752), with the parameter names of mamba_ssm; Megatron-Core has none.

Shape letters: B batch, S sequence, T tokens, E hidden_size; D channels (a tensor rank's), K channels of a state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model.model_shape import ModelShape
from precisionctl.model.recurrent_parts import Mamba
from precisionctl.trainer.backends.base import Backend, column_linear, norm_of
from precisionctl.trainer.backends.bf16_products import product
from precisionctl.trainer.model.recurrent.mamba_mixer import initial_steps
from precisionctl.trainer.model.recurrent.recurrence import by_text, convolution, convolved
from precisionctl.trainer.model.recurrent.selective_scan import selective_scan
from precisionctl.trainer.sequences import Positions


class Mamba1Mixer(nn.Module):
    """`x` goes through a causal convolution, the selective scan and a gate `z`. Rows of in_proj: x, z. Of x behind the
    convolution x_proj makes, for all channels together, what dt_proj makes `dt` of, `B` and `C`; each through a norm.
    Both compute in BF16. Tensor ranks have some of the channels, and add up what x_proj makes."""

    def __init__(self, name: str, model: ModelShape, mamba: Mamba, dt_rank: int, backend: Backend) -> None:
        super().__init__()
        self.ranks, self.parts, norm = backend.world.tensor, [*mamba.x_proj_parts], norm_of(model)
        dtype, device = backend.dtype, backend.device
        channels = mamba.inner_size // self.ranks.size
        self.in_proj = column_linear(backend, f"{name}.in_proj", model.hidden_size, mamba.in_proj_size, False, norm)
        self.conv1d = convolution(mamba.conv_size, mamba.conv_kernel_dim, backend, bias=True)
        self.x_proj = nn.Linear(channels, mamba.x_proj_size, bias=False, dtype=dtype, device=device)
        self.dt_layernorm = backend.norm(dt_rank, norm)
        self.b_layernorm = backend.norm(mamba.state_dim, norm)
        self.c_layernorm = backend.norm(mamba.state_dim, norm)
        self.dt_proj = nn.Linear(dt_rank, channels, dtype=dtype, device=device)
        self.dt_proj.bias = nn.Parameter(initial_steps(channels, backend))
        A_log = torch.arange(1, mamba.state_dim + 1, device=device).log().to(dtype)
        self.A_log = nn.Parameter(A_log.repeat(channels, 1))
        self.D = nn.Parameter(torch.ones(channels, dtype=dtype, device=device))
        self.out_proj = backend.linear(f"{name}.out_proj", mamba.inner_size, model.hidden_size, False, "row")

    def forward(self, hidden: Tensor, positions: Positions) -> Tensor:
        """`[T, E]` to the same."""
        out: Tensor = self.out_proj(by_text(self._mix, self.in_proj(hidden), positions))
        return out

    def _mix(self, projected: Tensor) -> Tensor:
        """What in_proj gives of texts that are S tokens long, `[B, S, 2 D]`, to `[B, S, D]`."""
        x, z = torch.chunk(projected, 2, -1)
        x = F.silu(convolved(x, self.conv1d))
        made = torch.split(self.ranks.reduce(product(F.linear, x, self.x_proj.weight)), self.parts, -1)
        norms = (self.dt_layernorm, self.b_layernorm, self.c_layernorm)
        normed = torch.cat([norm(each) for norm, each in zip(norms, made, strict=True)], -1)
        dt, B, C = torch.split(self.ranks.copy(normed), self.parts, -1)
        dt = F.softplus(product(F.linear, dt, self.dt_proj.weight).float() + self.dt_proj.bias.float())
        A, x = -self.A_log.float().exp(), x.float()
        y = selective_scan(x, dt, A, B, C)
        return ((y + self.D.float() * x) * F.silu(z.float())).to(projected.dtype)
