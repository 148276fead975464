"""A Mamba-2 mixer (arXiv 2405.21060) with Megatron-Core's parameter names (ssm/mamba_mixer.py), and its state space in
plain PyTorch, chunk by chunk (section 6: SSD).

Shape letters: B batch, S sequence, T tokens, E hidden_size; N heads of D channels (a tensor rank's), in G groups that
share the vectors B and C of K channels of a state.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model.model_shape import ModelShape
from precisionctl.model.recurrent_parts import Mamba
from precisionctl.trainer.backends.base import Backend, Norm, column_linear, norm_of
from precisionctl.trainer.model.recurrent.recurrence import by_text, convolution, convolved, decays_between, in_chunks
from precisionctl.trainer.sequences import Positions

_STEPS = (0.001, 0.1)
"""Of a new mixer: its heads' steps, where in_proj gives 0, are between these (Megatron-Core's dt_min and dt_max)."""


def initial_steps(heads: int, backend: Backend) -> Tensor:
    """What softplus makes the steps of a new mixer of."""
    steps = torch.empty(heads, device=backend.device).uniform_(*map(math.log, _STEPS)).exp_()
    return steps.expm1().log_().to(backend.dtype)


class MambaMixer(nn.Module):
    """`x` and the vectors `B` and `C` go through a causal convolution, the state space and a gate `z`, with a norm or
    without one, and out_proj. Rows of in_proj: z, x, B, C, then what makes the step `dt` of each head: the more of it,
    the more a token adds to the state, and the more decays. It is not clamped, as in Megatron-Core."""

    def __init__(self, name: str, model: ModelShape, mamba: Mamba, backend: Backend) -> None:
        super().__init__()
        ranks, dtype, device = backend.world.tensor.size, backend.dtype, backend.device
        self.parts = [rows // ranks for rows in mamba.in_proj_parts]
        self.groups, heads = mamba.num_groups // ranks, mamba.num_heads // ranks
        before = None if model.parallel_mixers else norm_of(model)
        self.in_proj = column_linear(backend, f"{name}.in_proj", model.hidden_size, mamba.in_proj_size, False, before)
        self.factors = model.multipliers.ssm if model.multipliers else None
        self.conv1d = convolution(mamba.conv_size, mamba.conv_kernel_dim, backend, bias=True)
        self.dt_bias = nn.Parameter(initial_steps(heads, backend))
        self.A_log = nn.Parameter(torch.empty(heads, device=device).uniform_(1, 16).log_().to(dtype))
        self.D = nn.Parameter(torch.ones(heads, dtype=dtype, device=device))
        self.norm: GatedNorm | None = None
        if mamba.gated_norm:
            self.norm = GatedNorm(mamba.inner_size // ranks, self.groups, Norm("RMSNorm", model.norm_epsilon), backend)
        self.out_proj = backend.linear(f"{name}.out_proj", mamba.inner_size, model.hidden_size, False, "row")

    def forward(self, hidden: Tensor, positions: Positions) -> Tensor:
        """`[T, E]` to the same."""
        out: Tensor = self.out_proj(by_text(self._mix, self.in_proj(hidden), positions))
        return out

    def _mix(self, projected: Tensor) -> Tensor:
        """What in_proj gives of texts that are S tokens long, `[B, S, parts]`, to `[B, S, N * D]`."""
        if self.factors:
            each = zip(torch.split(projected, self.parts, -1), self.factors, strict=True)
            projected = torch.cat([part * factor for part, factor in each], -1)
        z, xBC, dt = torch.split(projected, [self.parts[0], sum(self.parts[1:4]), self.parts[4]], -1)
        x, B, C = torch.split(F.silu(convolved(xBC, self.conv1d)), self.parts[1:4], -1)
        B, C = (torch.unflatten(each, -1, (self.groups, -1)) for each in (B, C))
        x = torch.unflatten(x, -1, (len(self.D), -1)).float()
        dt = F.softplus(dt.float() + self.dt_bias.float())
        A = -self.A_log.float().exp()
        y = state_space(x * dt[..., None], A * dt, B, C)
        y = (y + self.D.float()[:, None] * x).flatten(2)
        given: Tensor = self.norm(y, z) if self.norm else (y * F.silu(z.float())).to(z.dtype)
        return given


class GatedNorm(nn.Module):
    """RMSNorm of the channels of each group, multiplied by the SiLU of a gate before."""

    def __init__(self, size: int, groups: int, norm: Norm, backend: Backend) -> None:
        super().__init__()
        self.groups, self.norm = groups, norm
        self.weight = nn.Parameter(torch.ones(size, dtype=backend.dtype, device=backend.device))

    def forward(self, values: Tensor, gate: Tensor) -> Tensor:
        """FP32 values and gates `[..., size]` to the same, in the gates' dtype."""
        grouped = torch.unflatten(values * F.silu(gate.float()), -1, (self.groups, -1))
        return self.norm.of(grouped, self.weight.view(self.groups, -1), None).flatten(-2).to(gate.dtype)


def state_space(x: Tensor, g: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """`x` `[B, S, N, D]`, `g` `[B, S, N]`, `B` and `C` `[B, S, G, K]`, N a multiple of G; gives `[B, S, N, D]`,
    computed and returned in FP32 or wider.

    Each head has a state `h` `[K, D]`, of zeros at first, which decays by `exp(g)` and to which each token adds its
    numbers `x`: `h' = exp(g) h + B x^T`, and of which it reads `C^T h'`. Within a chunk that is a product of all tokens
    with each other, as in attention; what came before it is in the state."""
    length, channels = x.shape[1], x.shape[3]
    wide, groups = torch.promote_types(x.dtype, torch.float32), B.shape[2]
    B, C = (in_chunks(each.to(wide)) for each in (B, C))  # [B, G, chunks, CHUNK, K]
    x, g = (
        torch.unflatten(in_chunks(each.to(wide)), 1, (groups, -1)) for each in (x, g[..., None])
    )  # [B, G, heads of a group, chunks, CHUNK, ...]
    past = g.cumsum(4)  # the logarithm of what decays from a chunk's beginning to each token
    whole = past[..., -1:, :]
    inside = ((C @ B.mT)[:, :, None] * decays_between(past)) @ x
    added = B.mT @ _side_by_side(x * (whole - past).exp())
    left = _side_by_side(whole.exp().expand(*whole.shape[:-1], channels))
    state = torch.zeros_like(added[:, :, 0])  # [B, G, K, heads of a group * D]
    before = []
    for chunk in range(added.shape[2]):
        before.append(state)
        state = left[:, :, chunk] * state + added[:, :, chunk]
    from_state = torch.unflatten(C @ torch.stack(before, 2), -1, (-1, channels)).movedim(4, 2)
    made = inside + from_state * past.exp()
    return made.flatten(1, 2).flatten(2, 3)[:, :, :length].transpose(1, 2)


def _side_by_side(heads: Tensor) -> Tensor:
    """`[B, G, heads of a group, chunks, ..., D]` as `[B, G, chunks, ..., heads of a group * D]`."""
    return heads.movedim(2, 4).flatten(4)
