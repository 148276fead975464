"""Tensors that trainers store flat: as runs of elements, which begin and end anywhere, also in the middle of a row."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

from precisionctl.checkpoints.chunks import Chunk, whole
from precisionctl.checkpoints.torch_files.torch_zip import LocatedTensor
from precisionctl.param import TensorSpec


class FlatRun(NamedTuple):
    """`elements` that stand one after the other in a file, from byte `offset` on."""

    path: Path
    offset: int
    elements: int


class Flat(Protocol):
    """Elements that belong together: those of one tensor in row-major order, or of many."""

    def runs(self, start: int, count: int) -> Iterator[FlatRun]:
        """Elements `[start, start + count)`, in their order."""
        ...


class EndToEnd:
    """Flat tensors of one dtype, one after the other."""

    def __init__(self, parts: Sequence[tuple[Path, LocatedTensor]], counts: Sequence[int]) -> None:
        """`counts` has the number of elements of each part; padding behind them in the file is skipped."""
        self._parts = parts
        self._ends = list(accumulate(counts))

    @property
    def count(self) -> int:
        """Elements of all parts."""
        return self._ends[-1] if self._ends else 0

    def runs(self, start: int, count: int) -> Iterator[FlatRun]:
        at = bisect_right(self._ends, start)
        while count:
            (path, located), end = self._parts[at], self._ends[at]
            first = self._ends[at - 1] if at else 0
            taken = min(count, end - start)
            if taken:
                yield FlatRun(path, located.offset + (start - first) * located.dtype.itemsize, taken)
            start, count, at = start + taken, count - taken, at + 1


@dataclass(frozen=True)
class FlatSlice:
    """The elements of `whole` from number `first` on."""

    whole: Flat
    first: int

    def runs(self, start: int, count: int) -> Iterator[FlatRun]:
        return self.whole.runs(self.first + start, count)


@dataclass(frozen=True)
class Dealt:
    """A tensor cut into one piece of `each` elements for each of the `ranks`, as ZeRO 3 does; the last pieces are
    padded. A rank's piece begins at element `first` of what the rank has."""

    ranks: Sequence[Flat]
    first: int
    each: int

    def runs(self, start: int, count: int) -> Iterator[FlatRun]:
        while count:
            rank, within = divmod(start, self.each)
            taken = min(count, self.each - within)
            yield from self.ranks[rank].runs(self.first + within, taken)
            start, count = start + taken, count - taken


@dataclass(frozen=True)
class FlatTensor:
    """A tensor, and where its elements are."""

    spec: TensorSpec
    flat: Flat

    def chunks(self) -> Iterator[Chunk]:
        """Boxes of the tensor, some of them parts of rows."""
        start = 0
        for path, offset, count in self.flat.runs(0, self.spec.rows * self.spec.columns):
            for box in whole(self.spec).run(start, count):
                yield Chunk(box, path, offset)
                offset += box.elements * self.spec.dtype.itemsize
            start += count

    def slices(self) -> Iterator["FlatTensor"]:
        """The tensors at each index of its first dimension."""
        spec = TensorSpec(self.spec.shape[1:], self.spec.dtype)
        for index in range(self.spec.rows):
            yield FlatTensor(spec, FlatSlice(self.flat, index * self.spec.columns))


class FlatTensors:
    """Flat tensors by name, as a source of rows. Of many ranks a tensor has thousands of chunks: a few are kept."""

    def __init__(self, tensors: Mapping[str, FlatTensor]) -> None:
        self.specs: Mapping[str, TensorSpec] = {name: one.spec for name, one in tensors.items()}
        self._chunks = lru_cache(maxsize=64)(lambda name: tuple(tensors[name].chunks()))

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self._chunks(name)
