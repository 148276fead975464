"""The ranks' shards put together to logical tensors: all must be there and fit together, and replicas must be equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from precisionctl.checkpoints.chunks import in_pieces, read_bytes
from precisionctl.checkpoints.hf_directory.safetensors_file import StoredTensor, StoredTensors
from precisionctl.checkpoints.megatron.keys import expert_of
from precisionctl.checkpoints.torch_files.torch_zip import LocatedTensor
from precisionctl.checkpoints.torch_legacy.rank_directories import Rank
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint
from precisionctl.param import Parallel, Parallelism, TensorSpec

SMALL = 1 << 20
"""Replicas of tensors of up to this many bytes are compared, all of them."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a logical tensor, and where it is in the rank's file."""

    rank: Rank
    tensor: LocatedTensor


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A logical tensor: for each tensor-parallel rank that it is cut for, the replicas of that rank's shard. One entry
    for a tensor that is not cut."""

    spec: TensorSpec
    shards: tuple[tuple[Shard, ...], ...]


ByName = Mapping[str, Mapping[int, Sequence[Shard]]]
"""Shards by logical name and tensor-parallel rank."""


def gathered(
    entries: Iterable[tuple[Rank, str, LocatedTensor]], sizes: Parallelism
) -> dict[str, dict[int, list[Shard]]]:
    """Group (rank, logical name, tensor) by name and tensor-parallel rank."""
    found: dict[str, dict[int, list[Shard]]] = {}
    for rank, name, tensor in entries:
        index = rank.tensor % cut_for(name, sizes)
        found.setdefault(name, {}).setdefault(index, []).append(Shard(rank, tensor))
    return found


def cut_for(name: str, sizes: Parallelism) -> int:
    """The number of tensor-parallel ranks that a tensor is distributed over: experts can have their own."""
    return sizes.tensor_of(experts=expert_of(name) is not None)


def assembled(
    found: ByName, sizes: Parallelism, parallel: Callable[[str, LocatedTensor], Parallel]
) -> dict[str, ShardedTensor]:
    """The logical tensors that the shards in `found` make up, by name. `parallel(name, shard)` says how a tensor
    is cut.

    Raises DamagedCheckpoint where shards are missing, or differ in shape or dtype.
    """
    for name, by_rank in found.items():
        size = cut_for(name, sizes)
        first = next(iter(by_rank.values()))[0]
        if len(by_rank) != size:
            what = f"`{name}` is there on {len(by_rank)} of {size} tensor-parallel ranks"
            raise DamagedCheckpoint(what, where=first.rank.path.parent.parent, do="Is the copy whole?")
        for shard in (shard for replicas in by_rank.values() for shard in replicas):
            if (shard.tensor.dtype, shard.tensor.shape) != (first.tensor.dtype, first.tensor.shape):
                raise DamagedCheckpoint(
                    f"`{name}` is {shard.tensor.dtype} {list(shard.tensor.shape)}, "
                    f"but {first.tensor.dtype} {list(first.tensor.shape)} in {first.rank.path.parent.name}",
                    where=shard.rank.path,
                    do="Do these files belong to one checkpoint?",
                )
    tensors = {}
    for name, by_rank in found.items():  # how one is cut, others may tell: all are checked by now
        size, first = cut_for(name, sizes), by_rank[0][0]
        how = parallel(name, first.tensor)
        shape = list(first.tensor.shape)
        shards = [tuple(by_rank[index]) for index in range(size)]
        if how.kind == "replicated":
            shards = [tuple(shard for replicas in shards for shard in replicas)]
        else:
            axis = 0 if how.kind == "rows" else 1
            if len(shape) <= axis or any(shape[axis] * part % sum(how.parts) for part in how.parts):
                raise DamagedCheckpoint(f"`{name}` is {shape} on a rank", where=first.rank.path)
            shape[axis] *= size
        tensors[name] = ShardedTensor(TensorSpec(tuple(shape), first.tensor.dtype, how), tuple(shards))
    return tensors


def check_replicas(name: str, tensor: ShardedTensor) -> None:
    """Raise DamagedCheckpoint where replicas do not hold the same bytes. Reads them all, a megabyte at a time."""
    for first, *others in tensor.shards:
        spec = TensorSpec((first.tensor.nbytes,), DType.uint8)
        stored = StoredTensors({"": (first.rank.path, StoredTensor(spec, first.tensor.offset))})
        for other in others:
            replica = StoredTensors({"": (other.rank.path, StoredTensor(spec, other.tensor.offset))})
            for start, count in in_pieces(0, spec.rows, 1, SMALL):
                if not np.array_equal(read_bytes(stored, "", start, count), read_bytes(replica, "", start, count)):
                    raise DamagedCheckpoint(
                        f"`{name}` is not the same as in {first.rank.path.parent.name}",
                        where=other.rank.path,
                        do="Ranks that hold the same tensor must agree. Do these files belong to one checkpoint?",
                    )
