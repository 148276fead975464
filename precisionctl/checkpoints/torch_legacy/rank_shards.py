"""Shards of ranks as logical tensors: how many there must be, that they fit together, that replicas are equal."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from precisionctl.checkpoints.base import Box, Chunk, read_rows
from precisionctl.checkpoints.megatron.keys import expert_of
from precisionctl.checkpoints.torch_legacy.rank_directories import Rank
from precisionctl.checkpoints.torch_zip import LocatedTensor
from precisionctl.errors import DamagedCheckpoint
from precisionctl.param import Parallel, Parallelism, TensorSpec

SMALL = 1 << 20
"""Bytes of a tensor whose replicas are all compared."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a logical tensor."""

    rank: Rank
    tensor: LocatedTensor


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A logical tensor: for each rank that it is cut for, the replicas of that rank's shard."""

    spec: TensorSpec
    shards: tuple[tuple[Shard, ...], ...]


ByName = Mapping[str, Mapping[int, Sequence[Shard]]]
"""Shards by logical name and tensor-parallel rank."""


def gathered(
    entries: Iterable[tuple[Rank, str, LocatedTensor]], sizes: Parallelism
) -> dict[str, dict[int, list[Shard]]]:
    """The shards of each name."""
    found: dict[str, dict[int, list[Shard]]] = {}
    for rank, name, tensor in entries:
        index = rank.tensor % cut_for(name, sizes)
        found.setdefault(name, {}).setdefault(index, []).append(Shard(rank, tensor))
    return found


def cut_for(name: str, sizes: Parallelism) -> int:
    """How many tensor-parallel ranks share a tensor."""
    return sizes.tensor if expert_of(name) is None else sizes.expert_tensor or sizes.tensor


def assembled(
    found: ByName, sizes: Parallelism, parallel: Callable[[str, LocatedTensor, int], Parallel]
) -> dict[str, ShardedTensor]:
    """The logical tensors. `parallel` says how one is cut, from its name, its shard, and for how many ranks.

    Raises DamagedCheckpoint where shards are missing, or replicas differ in shape or dtype.
    """
    return {name: _assembled(name, shards, cut_for(name, sizes), parallel) for name, shards in found.items()}


def _assembled(
    name: str, found: Mapping[int, Sequence[Shard]], size: int, parallel: Callable[[str, LocatedTensor, int], Parallel]
) -> ShardedTensor:
    first = next(iter(found.values()))[0]
    if len(found) != size:
        what = f"`{name}` is there on {len(found)} of {size} tensor-parallel ranks"
        raise DamagedCheckpoint(what, where=first.rank.path.parent.parent, do="Is the copy whole?")
    for shard in (shard for replicas in found.values() for shard in replicas):
        if (shard.tensor.dtype, shard.tensor.shape) != (first.tensor.dtype, first.tensor.shape):
            raise DamagedCheckpoint(
                f"`{name}` is {shard.tensor.dtype} {list(shard.tensor.shape)}, "
                f"but {first.tensor.dtype} {list(first.tensor.shape)} in {first.rank.path.parent.name}",
                where=shard.rank.path,
                do="Do these files belong to one checkpoint?",
            )
    how = parallel(name, first.tensor, size)
    shape = list(first.tensor.shape)
    replicas = [tuple(found[index]) for index in range(size)]
    if how.kind == "replicated":
        replicas = [tuple(shard for shards in replicas for shard in shards)]
    else:
        axis = 0 if how.kind == "rows" else 1
        if len(shape) <= axis or shape[axis] % how.parts:
            raise DamagedCheckpoint(f"`{name}` is {shape} on a rank", where=first.rank.path)
        shape[axis] *= size
    return ShardedTensor(TensorSpec(tuple(shape), first.tensor.dtype, how), tuple(replicas))


def check_replicas(name: str, tensor: ShardedTensor) -> None:
    """Raise DamagedCheckpoint where replicas do not hold the same bytes."""
    for replicas in tensor.shards:
        for other in replicas[1:]:
            if not _equal(replicas[0], other):
                raise DamagedCheckpoint(
                    f"`{name}` is not the same as in {replicas[0].rank.path.parent.name}",
                    where=other.rank.path,
                    do="Ranks that hold the same tensor must agree. Do these files belong to one checkpoint?",
                )


@dataclass(frozen=True)
class _Both:
    """The bytes of two shards, as two tensors."""

    specs: Mapping[str, TensorSpec]
    found: Mapping[str, Chunk]

    def chunks(self, name: str) -> Sequence[Chunk]:
        return [self.found[name]]


def _equal(a: Shard, b: Shard) -> bool:
    """Whether two shards of one shape hold the same bytes, a megabyte at a time."""
    rows = TensorSpec(a.tensor.shape, a.tensor.dtype).nbytes
    places = {str(i): Chunk(Box(0, rows, 0, 1), shard.rank.path, shard.tensor.offset) for i, shard in enumerate((a, b))}
    both = _Both(dict.fromkeys(places, TensorSpec((rows,), torch.uint8)), places)
    return all(
        torch.equal(*(read_rows(both, each, start, min(SMALL, rows - start)) for each in places))
        for start in range(0, rows, SMALL)
    )
