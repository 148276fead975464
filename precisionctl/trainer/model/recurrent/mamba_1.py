"""A Mamba-1 mixer (arXiv 2312.00752) with the parameter names of mamba_ssm, as Megatron-Core has none; and its
selective scan in plain PyTorch, chunk by chunk (algorithm 2).

Shape letters: B batch, S sequence, T tokens, L tokens of a chunk, E hidden_size; D channels (a tensor rank's), K
channels of a state.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model.model_shape import ModelShape
from precisionctl.model.recurrent_parts import Mamba
from precisionctl.trainer.backends.base import Backend, column_linear, norm_of, recompute
from precisionctl.trainer.backends.bf16_products import product
from precisionctl.trainer.model.recurrent.mamba_2 import initial_steps
from precisionctl.trainer.model.recurrent.recurrence import CHUNK, by_text, convolution, convolved
from precisionctl.trainer.sequences import Positions


class Mamba1Mixer(nn.Module):
    """`x` goes through a causal convolution, the selective scan and a gate `z`. Rows of in_proj: x, z. Of x behind the
    convolution x_proj makes, for all channels together, what dt_proj makes `dt` of, `B` and `C`; in some models each
    through a norm. Both compute in BF16. Tensor ranks have some of the channels, and add up what x_proj makes."""

    def __init__(self, name: str, model: ModelShape, mamba: Mamba, dt_rank: int, backend: Backend) -> None:
        super().__init__()
        self.ranks, self.parts, norm = backend.world.tensor, [*mamba.x_proj_parts], norm_of(model)
        dtype, device = backend.dtype, backend.device
        channels = mamba.inner_size // self.ranks.size
        self.in_proj = column_linear(backend, f"{name}.in_proj", model.hidden_size, mamba.in_proj_size, False, norm)
        self.conv1d = convolution(mamba.conv_size, mamba.conv_kernel_dim, backend, bias=True)
        self.x_proj = nn.Linear(channels, mamba.x_proj_size, bias=False, dtype=dtype, device=device)
        self.has_norms, self.l2_epsilon = mamba.bcdt_layernorm, mamba.bcdt_l2_norm_epsilon
        if self.has_norms:
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
        made = self._normed(self.ranks.reduce(product(F.linear, x, self.x_proj.weight)))
        dt, B, C = torch.split(self.ranks.copy(made), self.parts, -1)
        dt = F.softplus(product(F.linear, dt, self.dt_proj.weight).float() + self.dt_proj.bias.float())
        A, x = -self.A_log.float().exp(), x.float()
        y = selective_scan(x, dt, A, B, C)
        return ((y + self.D.float() * x) * F.silu(z.float())).to(projected.dtype)

    def _normed(self, made: Tensor) -> Tensor:
        """What x_proj makes, `[B, S, sum(parts)]`, each part normalised, if the model has norms of them."""
        parts = torch.split(made, self.parts, -1)
        if self.has_norms:
            norms = (self.dt_layernorm, self.b_layernorm, self.c_layernorm)
            return torch.cat([norm(each) for norm, each in zip(norms, parts, strict=True)], -1)
        if self.l2_epsilon is not None:
            return torch.cat([F.rms_norm(each, each.shape[-1:], eps=self.l2_epsilon) for each in parts], -1)
        return made


def selective_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """`x` and `dt` `[B, S, D]`, `A` `[D, K]`, `B` and `C` `[B, S, K]`; gives `[B, S, D]`, computed and returned in FP32
    or wider.

    Each channel has a state `h` `[K]`, of zeros at first, of which each number decays at its own rate `A`, by what the
    channel's step `dt` says, and to which each token adds its number `x`: `h' = exp(dt A) h + dt x B`, and of which it
    reads `C^T h'`. There are too many rates for products of tokens with each other, as Mamba-2 has them, so within a
    chunk the states of all tokens are made by a parallel prefix scan. These are too large to keep: the backward
    computes each chunk again."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x, dt, A, B, C = (each.to(wide) for each in (x, dt, A, B, C))
    state, made = x.new_zeros(len(x), *A.shape), []
    chunks = zip(*(torch.split(each, CHUNK, 1) for each in (x * dt, dt, B, C)), strict=True)
    for chunk in chunks:
        given, state = recompute(_scan_chunk, state, A, *chunk, again=nullcontext())
        made.append(given)
    return torch.cat(made, 1)


def _scan_chunk(state: Tensor, A: Tensor, added: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """Of the state before a chunk `[B, D, K]` and its tokens, `added` being `dt x`: what they read `[B, L, D]`, and the
    state after it."""
    decay = (dt[..., None] * A).exp()  # [B, L, D, K]
    states = added[..., None] * B[:, :, None]
    reach = 1
    while reach < decay.shape[1]:
        # `states` has what the last `reach` tokens added, as it is now, and `decay` what decays over all of these
        earlier = F.pad(states[:, :-reach], (0, 0, 0, 0, reach, 0))
        states = states + decay * earlier
        decay = decay * F.pad(decay[:, :-reach], (0, 0, 0, 0, reach, 0), value=1.0)
        reach *= 2
    states = states + decay * state[:, None]
    return (states @ C[..., None])[..., 0], states[:, -1].clone()  # a view would keep all of the states
