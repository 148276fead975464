"""Kimi delta attention (arXiv 2510.26692) in the place of attention, with Megatron-Core's parameter names
(ssm/gated_delta_net/kda.py, of Megatron-LM's dev branch).

Shape letters: B batch, S sequence, T tokens, E hidden_size; N heads (a tensor rank's), of K channels of a key and D of
a value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model.model_shape import ModelShape
from precisionctl.model.recurrent_parts import GatedDeltaNet
from precisionctl.trainer.backends.base import Backend, norm_of
from precisionctl.trainer.model.recurrent.delta_rule import gated_delta_rule
from precisionctl.trainer.model.recurrent.gated_delta_net import in_heads
from precisionctl.trainer.model.recurrent.recurrence import by_text, convolution, convolved
from precisionctl.trainer.sequences import Positions


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
