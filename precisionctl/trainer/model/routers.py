"""Routers: the scores by which they choose experts, and what keeps the loads of experts even, which are losses beside
the run's, and DeepSeek's update of expert_bias.

Letters: L layers with experts, B rows, S tokens of a row, E experts, K experts of a token. Means are over real tokens.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.model.model_parts import MoE
from precisionctl.trainer.model.router_balance import Balance
from precisionctl.trainer.parallel.world import World

SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}
"""Of logits `[..., experts]`, by their name in MoE (`score_function`)."""


def over_their_sum(scores: Tensor) -> Tensor:
    """Scores `[T, experts]`, of all or of the chosen experts, normalised so that a token's add up to 1."""
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


class RouterLosses:
    """The losses of all routers of a model, pass by pass, and their sums over an update.

    Routers show what they do between `begin_pass` and `end_pass`. What is computed again in the backward must be all of
    it, but counts no second time. A micro-batch counts by its targets, as in the loss beside these.
    """

    def __init__(self, moe: MoE, balance: Balance, world: World, device: torch.device) -> None:
        self._moe, self._world, self._device = moe, world, device
        self._rate = balance.bias_update_rate
        self._coefficients = {name: value for name, value in balance.on.items() if name != "bias_update_rate"}
        self.begin_update()

    @property
    def names(self) -> tuple[str, ...]:
        """The losses that are on, in the order of `sums`."""
        return tuple(self._coefficients)

    def begin_update(self) -> None:
        """Forget all passes so far."""
        self.sums = torch.zeros(len(self.names), device=self._device)
        """Over passes: each loss, without its coefficient, times the pass's targets, FP32 `[losses]`. Of losses of each
        layer the mean."""
        self._global: Tensor | float = 0.0
        self._loads: dict[nn.Parameter, Tensor] = {}

    def begin_pass(self, tokens: Tensor, padding_mask: Tensor | None) -> None:
        """Before a pass with gradients over tokens `[B, S]`; `padding_mask` is False at padding."""
        self._real = torch.ones_like(tokens, dtype=torch.float32) if padding_mask is None else padding_mask.float()
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []
        self._open = True

    def see(self, logits: Tensor, chosen: Tensor, expert_bias: nn.Parameter | None) -> None:
        """What a router makes of all tokens: logits, FP32 `[B * S, E]`, and the experts that it chooses, `[B * S, K]`.

        A loss counts those that scores alone would choose, without bias and groups (as Megatron-Core's
        compute_routing_scores_for_aux_loss)."""
        if not torch.is_grad_enabled():
            return
        if expert_bias is not None and self._rate and self._open:
            self._loads[expert_bias] = self._loads.get(expert_bias, 0) + self._count(chosen).sum(0)
        if not self.names:
            return
        scores = SCORES[self._moe.score_function](logits)
        if self._moe.score_function != "softmax":
            scores = over_their_sum(scores)
        by_score = scores.topk(self._moe.topk).indices if self._moe.expert_bias or self._moe.num_groups else chosen
        of_experts = torch.einsum("bse,bs->be", scores.view(*self._real.shape, -1), self._real)
        squares = logits.logsumexp(-1).square().view_as(self._real) * self._real
        seen = of_experts, self._count(by_score), squares.sum()
        if self._open:
            self._seen.append(seen)

    def end_pass(self, targets: int) -> Tensor | float:
        """After a pass: its losses times coefficients and `targets`, FP32 `[]`, to add to a loss that is summed over
        these. Of tensor ranks, which all have the same, each gets its share."""
        self._open = False
        if not self.names or not self._seen:  # no losses, or tables choose in all layers
            return 0.0
        scores, counts, squares = (torch.stack(each) for each in zip(*self._seen, strict=True))  # [L, B, E] twice, [L]
        lengths = self._real.sum(1)
        tokens, layers, factor = lengths.sum(), len(scores), self._moe.num_experts / self._moe.topk
        p, f = scores.sum(1) / tokens, counts.sum(1) / tokens
        losses = {
            "pooled_loss": self._moe.num_experts * (p.mean(0) * f.mean(0)).sum(),
            "aux_loss": factor * (p * f).sum(-1).mean(),
            "seq_aux_loss": factor * (scores * counts / lengths[:, None] ** 2).sum(-1).mean(),
            "z_loss": squares.mean() / tokens,
        }
        if "global_aux_loss" in self.names:
            here = torch.cat([counts.sum(1).flatten(), tokens[None]])
            self._global = self._global + self._world.sum_over_data_ranks(here)
            of_update = (self._global[:-1] / self._global[-1]).view_as(f)
            losses["global_aux_loss"] = factor * (p * of_update).sum(-1).mean()
        self.sums = self.sums + targets * torch.stack([losses[name] for name in self.names]).detach()
        total = sum(
            coefficient * losses[name] * (1 if name == "pooled_loss" else layers)
            for name, coefficient in self._coefficients.items()
        )
        return total * targets / self._world.tensor.size

    def update_biases(self, skip: Tensor) -> None:
        """After an update: move expert_bias towards experts that it chose less often than the mean; nowhere if it was
        skipped, bool `[]`."""
        if not self._loads:
            return
        loads = self._world.sum_over_data_ranks(torch.stack([*self._loads.values()]))  # [L, E]
        steps = (loads.mean(-1, keepdim=True) - loads).sign() * self._rate * ~skip
        for bias, step in zip(self._loads, steps, strict=True):
            bias.data += step

    def _count(self, chosen: Tensor) -> Tensor:
        """How often each expert is chosen in each row, FP32 `[B, E]`."""
        rows, each = len(self._real), chosen.shape[1]
        real = self._real.repeat_interleave(each, 1)
        return real.new_zeros(rows, self._moe.num_experts).scatter_add_(1, chosen.reshape(rows, -1), real)
