"""The collectives of tensor and expert parallelism within a layer, forward and backward.

Each tensor-parallel rank has a shard of a layer's GEMMs, cut as by Megatron (Shoeybi et al., 2019, section 3; with
sequence parallelism, Korthikanti et al., 2022, section 4.2.2). Between those GEMMs all ranks have the same tokens or,
with `sequence`, each has a part of them. Each expert-parallel rank has some of a layer's experts, and its own rows of
data.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class _Collective(torch.autograd.Function):
    """A collective with another one as its backward: `forward_op` of the values, `backward_op` of their gradient."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, forward_op: Callable[[Tensor], Tensor], backward_op: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.backward_op = backward_op
        return forward_op(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.backward_op(gradient), None, None


def _with_backward(
    values: Tensor, forward_op: Callable[[Tensor], Tensor], backward_op: Callable[[Tensor], Tensor]
) -> Tensor:
    out: Tensor = _Collective.apply(values, forward_op, backward_op)  # type: ignore[no-untyped-call]
    return out


def _identity(values: Tensor) -> Tensor:
    return values.view_as(values)


@dataclass(frozen=True)
class _GroupRanks:
    """This process as rank `rank` of a `group` of `size` ranks; without a group it is alone."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks, without gradient."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """The maximum over the ranks, without gradient."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def all_gather(self, values: Tensor) -> Tensor:
        """All ranks' values concatenated along dimension 0, without gradient."""
        if self.size == 1:
            return values
        out = values.new_empty(len(values) * self.size, *values.shape[1:])
        _all_gather_tensor(out, values.contiguous(), group=self.group)
        return out

    def _all_reduce(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return values
        values = values.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(values, how, group=self.group)
        return values


@dataclass(frozen=True)
class TensorRanks(_GroupRanks):
    """The tensor-parallel ranks. Dimension 0 of all values is tokens; with `sequence` these are distributed over the
    ranks, so their number must be a multiple of `size`.

    A region in which each rank computes with its shard of the weights begins with `enter` and ends with `leave`, which
    sums all ranks' results. Gradients inside a region are partial sums. `gather` and `copy` together do what `enter`
    does, in two steps: between them all ranks compute the same, and gradients are complete.
    """

    sequence: bool = False

    @classmethod
    def of(cls, mesh: DeviceMesh, sequence: bool) -> "TensorRanks":
        """The ranks of the mesh's dimension `tensor`."""
        ranks = mesh["tensor"]
        return cls(ranks.size(), ranks.get_local_rank(), ranks.get_group(), sequence and ranks.size() > 1)

    def enter(self, values: Tensor) -> Tensor:
        """Begin a region: returns all tokens; in the backward gradients are summed over the ranks. An all-gather whose
        backward is a reduce-scatter or, without `sequence`, `copy`."""
        return _with_backward(values, self.all_gather, self._reduce_scatter) if self.sequence else self.copy(values)

    def leave(self, partial: Tensor) -> Tensor:
        """End a region: returns the sum of all ranks' partial results for this rank's tokens. A reduce-scatter or,
        without `sequence`, an all-reduce."""
        return _with_backward(partial, self._reduce_scatter, self.all_gather) if self.sequence else self.reduce(partial)

    def reduce(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' partial results for all tokens: an all-reduce."""
        return partial if self.size == 1 else _with_backward(partial, self.all_reduce_sum, _identity)

    def gather(self, values: Tensor) -> Tensor:
        """All tokens, for a computation that is the same on all ranks, and so are its gradients: an all-gather."""
        return _with_backward(values, self.all_gather, self.local_tokens) if self.sequence else values

    def scatter(self, values: Tensor) -> Tensor:
        """This rank's part of all tokens, after such a computation: the inverse of `gather`."""
        return _with_backward(values, self.local_tokens, self.all_gather) if self.sequence else values

    def copy(self, values: Tensor) -> Tensor:
        """The identity, whose gradients are all-reduced: for values that are the same on all ranks, before each
        computes with its own shard."""
        return values if self.size == 1 else _with_backward(values, _identity, self.all_reduce_sum)

    def local_tokens(self, values: Tensor) -> Tensor:
        """This rank's part of all tokens."""
        return values.chunk(self.size)[self.rank] if self.sequence else values

    def _reduce_scatter(self, values: Tensor) -> Tensor:
        out = values.new_empty(len(values) // self.size, *values.shape[1:])
        _reduce_scatter_tensor(out, values.contiguous(), group=self.group)
        return out


NO_TENSOR_PARALLELISM = TensorRanks()
"""A single rank, which has all of each layer."""

# PyTorch 2.13 has new names for these two, and warns of the old ones
_all_gather_tensor: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_tensor: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class ExpertRanks(_GroupRanks):
    """The expert-parallel ranks: rank i of `size` has the i-th part of each layer's experts, by number. `replicas` is
    the group of all ranks with the same experts."""

    replicas: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "ExpertRanks":
        """The ranks of the mesh's dimension `expert`, the last but one."""
        ranks = mesh["expert"]
        here, parts = ranks.get_local_rank(), mesh.mesh.movedim(-2, 0).flatten(1)  # `[expert, ranks]`
        replicas = [dist.new_group(those) for those in parts.tolist()]  # every rank must create every group
        return cls(ranks.size(), here, ranks.get_group(), replicas[here])

    def local_experts(self, experts: int) -> range:
        """The numbers of this rank's experts, of `experts` in all."""
        each = experts // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def token_dispatch(self, counts: Sequence[int], device: torch.device) -> "TokenDispatch":
        """How to send tokens to their experts' ranks. They are sorted by expert, with `counts[e]` for expert e."""
        if self.size == 1:
            return TokenDispatch(tuple(counts))
        mine = torch.tensor(counts, device=device).view(self.size, -1)
        theirs = torch.empty_like(mine)  # row r: how many tokens rank r has for each of this rank's experts
        dist.all_to_all_single(theirs, mine, group=self.group)
        sent, received = mine.sum(1).tolist(), theirs.sum(1).tolist()
        numbers = torch.arange(theirs.shape[1], device=device).expand_as(theirs).flatten()
        order = numbers.repeat_interleave(theirs.flatten()).argsort(stable=True)
        return TokenDispatch(tuple(theirs.sum(0).tolist()), order, sent, received, self.group)


@dataclass(frozen=True)
class TokenDispatch:
    """The exchange of tokens between expert-parallel ranks.

    `counts` has the number of tokens for each of this rank's experts. Rank r is sent `sent[r]` tokens, and
    `received[r]` come from it. Those arrive rank by rank, each rank's sorted by expert; the permutation `order` sorts
    all of them by expert. It is None if all experts are on this rank.
    """

    counts: tuple[int, ...] = ()
    order: Tensor | None = None
    sent: Sequence[int] = field(default_factory=list)
    received: Sequence[int] = field(default_factory=list)
    group: dist.ProcessGroup | None = None

    def dispatch(self, values: Tensor) -> Tensor:
        """Send values of tokens `[tokens, ...]`, sorted by expert, to their experts' ranks: an all-to-all. Returns
        those for this rank's experts, sorted by expert."""
        return (
            values if self.order is None else _with_backward(values, self._to_experts, self._from_experts)[self.order]
        )

    def combine(self, values: Tensor) -> Tensor:
        """The inverse: send the experts' outputs back to the ranks of their tokens."""
        if self.order is None:
            return values
        return _with_backward(values[self.order.argsort()], self._from_experts, self._to_experts)

    def _to_experts(self, values: Tensor) -> Tensor:
        return self._all_to_all(values, self.sent, self.received)

    def _from_experts(self, values: Tensor) -> Tensor:
        return self._all_to_all(values, self.received, self.sent)

    def _all_to_all(self, values: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        out = values.new_empty(sum(received), *values.shape[1:])
        dist.all_to_all_single(out, values.contiguous(), list(received), list(sent), group=self.group)
        return out
