"""Ranks that share the work of a layer: what they pass to one another on the way forward, and back.

Tensor ranks each have a part of a layer's GEMMs, as Megatron cuts them (Shoeybi et al., 2019, section 3; with
`sequence`, Korthikanti et al., 2022, section 4.2.2): between those parts all have the same tokens or, with `sequence`,
each its share of them. Expert ranks each have some of a layer's experts, and rows of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Pass = Callable[[Tensor], Tensor]


class _Passed(torch.autograd.Function):
    """`there` of the values, and `back` of their gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, there: Pass, back: Pass) -> Tensor:
        ctx.back = back
        return there(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradient), None, None


def _passed(values: Tensor, there: Pass, back: Pass) -> Tensor:
    made: Tensor = _Passed.apply(values, there, back)  # type: ignore[no-untyped-call]
    return made


def _same(values: Tensor) -> Tensor:
    return values.view_as(values)


@dataclass(frozen=True)
class _GroupRanks:
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    def summed(self, values: Tensor) -> Tensor:
        """Over all ranks; no gradient passes."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        """Over all ranks; no gradient passes."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def gathered(self, values: Tensor) -> Tensor:
        """Dimension 0 of all ranks, one after the other; no gradient passes."""
        if self.size == 1:
            return values
        out = values.new_empty(len(values) * self.size, *values.shape[1:])
        _all_gather(out, values.contiguous(), group=self.group)
        return out

    def _reduced(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return values
        values = values.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(values, how, group=self.group)
        return values


@dataclass(frozen=True)
class TensorRanks(_GroupRanks):
    """Dimension 0 of what is passed are tokens; `sequence` cuts them, so their number must be a multiple of `size`.

    A region in which each rank computes its part begins with `enter` and ends with `leave`: the sum of all ranks'
    results. Gradients inside it are a rank's part of the whole. `gather` and `share` together begin a region in two
    steps, between which all ranks compute the same, with whole gradients.
    """

    sequence: bool = False

    @classmethod
    def of(cls, mesh: DeviceMesh, sequence: bool) -> "TensorRanks":
        """The ranks of the mesh's dimension `tensor`."""
        ranks = mesh["tensor"]
        return cls(ranks.size(), ranks.get_local_rank(), ranks.get_group(), sequence and ranks.size() > 1)

    def enter(self, values: Tensor) -> Tensor:
        """All tokens; gradients are summed."""
        return self.share(values) if not self.sequence else _passed(values, self.gathered, self._scattered)

    def leave(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts; of this rank's tokens."""
        return _passed(part, self._scattered, self.gathered) if self.sequence else self.leave_whole(part)

    def leave_whole(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts; of all tokens."""
        return part if self.size == 1 else _passed(part, self.summed, _same)

    def gather(self, values: Tensor) -> Tensor:
        """All tokens, with which all ranks do the same: so the gradients of all are the same."""
        return _passed(values, self.gathered, self.mine) if self.sequence else values

    def share(self, values: Tensor) -> Tensor:
        """What all ranks have alike, for each to do something else with; gradients are summed."""
        return values if self.size == 1 else _passed(values, _same, self.summed)

    def mine(self, values: Tensor) -> Tensor:
        """This rank's tokens of all."""
        return values.chunk(self.size)[self.rank] if self.sequence else values

    def _scattered(self, values: Tensor) -> Tensor:
        out = values.new_empty(len(values) // self.size, *values.shape[1:])
        _reduce_scatter(out, values.contiguous(), group=self.group)
        return out


ALL_OF_IT = TensorRanks()
"""One rank, which has all of each layer."""

# PyTorch 2.13 has new names for these two, and warns of the old ones
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class ExpertRanks(_GroupRanks):
    """Rank i of `size` has the i-th part of each layer's experts, by number. `alike` are all with the same part."""

    alike: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "ExpertRanks":
        """The ranks of the mesh's dimension `expert`, the last but one."""
        ranks = mesh["expert"]
        here, parts = ranks.get_local_rank(), mesh.mesh.movedim(-2, 0).flatten(1)  # `[expert, ranks]`
        alike = [dist.new_group(those) for those in parts.tolist()]  # every rank makes all of them
        return cls(ranks.size(), here, ranks.get_group(), alike[here])

    def mine(self, experts: int) -> range:
        """The numbers of this rank's, of so many."""
        each = experts // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def dispatch(self, counts: Sequence[int], device: torch.device) -> "Dispatch":
        """How tokens that are sorted by expert, `counts[0]` of expert 0 first and so on, get to where those are."""
        if self.size == 1:
            return Dispatch(tuple(counts))
        mine = torch.tensor(counts, device=device).view(self.size, -1)
        theirs = torch.empty_like(mine)  # row r: how many tokens rank r has for each of this rank's experts
        dist.all_to_all_single(theirs, mine, group=self.group)
        sent, received = mine.sum(1).tolist(), theirs.sum(1).tolist()
        numbers = torch.arange(theirs.shape[1], device=device).expand_as(theirs).flatten()
        order = numbers.repeat_interleave(theirs.flatten()).argsort(stable=True)
        return Dispatch(tuple(theirs.sum(0).tolist()), order, sent, received, self.group)


@dataclass(frozen=True)
class Dispatch:
    """`counts` are the tokens of each of this rank's experts. They come from each rank in turn, sorted by expert, and
    `order` sorts all of them; None where all are at home."""

    counts: tuple[int, ...] = ()
    order: Tensor | None = None
    sent: Sequence[int] = field(default_factory=list)
    received: Sequence[int] = field(default_factory=list)
    group: dist.ProcessGroup | None = None

    def there(self, values: Tensor) -> Tensor:
        """What belongs to tokens `[tokens, ...]`, sorted by expert, to this rank's experts."""
        if self.order is None:
            return values
        return _passed(values, self._out, self._home)[self.order]

    def back(self, values: Tensor) -> Tensor:
        """The other way around."""
        return values if self.order is None else _passed(values[self.order.argsort()], self._home, self._out)

    def _out(self, values: Tensor) -> Tensor:
        return self._exchanged(values, self.sent, self.received)

    def _home(self, values: Tensor) -> Tensor:
        return self._exchanged(values, self.received, self.sent)

    def _exchanged(self, values: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        out = values.new_empty(sum(received), *values.shape[1:])
        dist.all_to_all_single(out, values.contiguous(), list(received), list(sent), group=self.group)
        return out


AT_HOME = Dispatch()
