"""A gated delta net in the place of attention, with Megatron-Core's parameter names (ssm/gated_delta_net.py).

Shape letters: B batch, S sequence, T tokens, E hidden_size; H key heads and N value heads (a tensor rank's), of K and D
channels.
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
