"""Delta nets in the place of attention, with Megatron-Core's parameter names: the gated delta net
(ssm/gated_delta_net.py) and Kimi delta attention (arXiv 2510.26692; ssm/gated_delta_net/kda.py, of Megatron-LM's dev
branch).

Shape letters: B batch, S sequence, T tokens, E hidden_size; H key heads and N value heads (a tensor rank's), of K and D
channels. Kimi delta attention has as many of both.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model.model_shape import ModelShape
from precisionctl.model.recurrent_parts import GatedDeltaNet
from precisionctl.trainer.backends.base import Backend, column_linear, norm_of
from precisionctl.trainer.model.recurrent.delta_rule import gated_delta_rule
from precisionctl.trainer.model.recurrent.recurrence import by_text, convolution, convolved
from precisionctl.trainer.sequences import Positions


def in_heads(mixed: Tensor, gdn: GatedDeltaNet) -> tuple[Tensor, ...]:
    """Queries, keys and values of a tensor rank `[B, S, channels]` as `[B, S, H, K]` twice and `[B, S, N, D]`."""
    ranks = gdn.conv_size // mixed.shape[-1]
    each = torch.split(mixed, [rows // ranks for rows in gdn.conv_parts], -1)
    sizes = (gdn.key_head_dim, gdn.key_head_dim, gdn.value_head_dim)
    return tuple(part.reshape(*part.shape[:2], -1, size) for part, size in zip(each, sizes, strict=True))


class GatedDeltaNetAttention(nn.Module):
    """Queries, keys and values go through a causal convolution, the gated delta rule, a norm of each head that is
    multiplied by a gate, and out_proj. Rows of in_proj: queries, keys, values, gates (z), then what makes the rule's
    `beta` (b) and `g` (a), one for each value head."""

    def __init__(self, name: str, model: ModelShape, gdn: GatedDeltaNet, backend: Backend) -> None:
        super().__init__()
        ranks, dtype, device = backend.world.tensor.size, backend.dtype, backend.device
        self.gdn, self.parts = gdn, [rows // ranks for rows in gdn.in_proj_parts]
        norm, heads = norm_of(model), gdn.num_value_heads // ranks
        fused = norm if model.fused_layernorms else None
        self.in_proj = column_linear(backend, f"{name}.in_proj", model.hidden_size, gdn.in_proj_size, False, fused)
        self.conv1d = convolution(gdn.conv_size, gdn.conv_kernel_dim, backend)
        self.dt_bias = nn.Parameter(torch.ones(heads, dtype=dtype, device=device))
        self.A_log = nn.Parameter(torch.empty(heads, device=device).uniform_(1, 16).log_().to(dtype))
        out_norm = norm if gdn.norm_epsilon is None else replace(norm, epsilon=gdn.norm_epsilon)
        self.out_norm = backend.norm(gdn.value_head_dim, out_norm)
        self.opening = F.silu if gdn.output_gate == "silu" else torch.sigmoid
        self.fastest = 2 if gdn.allow_neg_eigval else 1
        self.out_proj = backend.linear(f"{name}.out_proj", gdn.value_size, model.hidden_size, False, "row")

    def forward(self, hidden: Tensor, positions: Positions) -> Tensor:
        """`[T, E]` to the same."""
        out: Tensor = self.out_proj(by_text(self._attend, self.in_proj(hidden), positions))
        return out

    def _attend(self, projected: Tensor) -> Tensor:
        """What in_proj gives of texts that are S tokens long, `[B, S, parts]`, to `[B, S, N * D]`."""
        channels = sum(self.parts[:3])
        mixed, z, b, a = torch.split(projected, [channels, *self.parts[3:]], -1)
        query, key, value = in_heads(F.silu(convolved(mixed, self.conv1d)), self.gdn)
        g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        read = gated_delta_rule(query, key, value, g, self.fastest * b.sigmoid())
        gated: Tensor = self.out_norm(read) * self.opening(z.reshape(read.shape).float())
        return gated.to(projected.dtype).flatten(2)


def kimi_delta_rule(mixed: Tensor, f: Tensor, b: Tensor, gdn: GatedDeltaNet, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """What heads read, `[B, S, N, D]`, by the gated delta rule, of texts that are S tokens long: of queries, keys and
    values as convolutions give them, `[B, S, channels]`, what the rule's `g` is made of, `[B, S, N * K]`, and what its
    `beta` is, `[B, S, N]`. Logarithms of decays, one for each channel of a key, are above `kda_lower_bound`, if there
    is one. `A_log` is `[N]`, `dt_bias` `[N * K]`."""
    query, key, value = in_heads(F.silu(mixed), gdn)
    A, dt = A_log.float().exp()[:, None], torch.unflatten(f.float() + dt_bias, -1, (len(A_log), -1))
    bound = gdn.kda_lower_bound
    g = -A * F.softplus(dt) if bound is None else bound * (A * dt).sigmoid()
    return gated_delta_rule(query, key, value, g, b.sigmoid())


class KimiDeltaAttention(nn.Module):
    """A gated delta net whose state decays by a number of each channel of a key. Rows of in_proj: queries, keys and
    values; then what makes decays, and gates, unless linears of their own make these in two steps. All tensor ranks
    compute what is between two steps, and learning rates, of all tokens; each its heads."""

    def __init__(self, name: str, model: ModelShape, gdn: GatedDeltaNet, backend: Backend) -> None:
        super().__init__()
        ranks, hidden, rank = backend.world.tensor, model.hidden_size, gdn.kda_lora_rank
        dtype, device, heads = backend.dtype, backend.device, gdn.num_value_heads // ranks.size
        self.gdn, self.ranks, self.heads = gdn, ranks, slice(ranks.rank * heads, (ranks.rank + 1) * heads)
        self.in_proj = backend.linear(f"{name}.in_proj", hidden, gdn.in_proj_size, False, "inner column")
        if rank is not None:
            self.f_a_proj = backend.linear(f"{name}.f_a_proj", hidden, rank, False)
            self.f_b_proj = backend.linear(f"{name}.f_b_proj", rank, gdn.key_size, False, "inner column")
            self.g_a_proj = backend.linear(f"{name}.g_a_proj", hidden, rank, False)
            self.g_b_proj = backend.linear(f"{name}.g_b_proj", rank, gdn.value_size, False, "inner column")
        self.beta_proj = backend.linear(f"{name}.beta_proj", hidden, gdn.num_value_heads, False)
        self.conv1d = convolution(gdn.conv_size, gdn.conv_kernel_dim, backend)
        self.dt_bias = nn.Parameter(torch.ones(gdn.key_size // ranks.size, dtype=dtype, device=device))
        self.A_log = nn.Parameter(torch.empty(heads, device=device).uniform_(1, 16).log_().to(dtype))
        self.out_norm = backend.norm(gdn.value_head_dim, norm_of(model))
        self.out_proj = backend.linear(f"{name}.out_proj", gdn.value_size, hidden, False, "row")

    def forward(self, hidden: Tensor, positions: Positions) -> Tensor:
        """`[T, E]` to the same."""
        hidden = self.ranks.gather(hidden)
        made = [self.in_proj(hidden)]
        if self.gdn.kda_lora_rank is not None:
            made += [self.f_b_proj(self.f_a_proj(hidden)), self.g_b_proj(self.g_a_proj(hidden))]
        made.append(self.ranks.copy(self.beta_proj(hidden))[:, self.heads])
        out: Tensor = self.out_proj(by_text(self._attend, torch.cat(made, -1), positions))
        return out

    def _attend(self, made: Tensor) -> Tensor:
        """What the linears make of texts that are S tokens long: queries, keys, values, what `g` is made of, gates and
        what `beta` is, `[B, S, parts]`; gives `[B, S, N * D]`."""
        parts = (self.gdn.conv_size, self.gdn.key_size, self.gdn.value_size, self.gdn.num_value_heads)
        mixed, f, gate, b = torch.split(made, [rows // self.ranks.size for rows in parts], -1)
        read = kimi_delta_rule(convolved(mixed, self.conv1d), f, b, self.gdn, self.A_log, self.dt_bias)
        gated: Tensor = self.out_norm(read) * gate.reshape(read.shape).float().sigmoid()
        return gated.to(made.dtype).flatten(2)
