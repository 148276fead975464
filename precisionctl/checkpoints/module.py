"""A live model as the source or the target of a conversion: its chunks are its tensors themselves.

It has no files, and its FP8 state is read and set module by module (`fp8_state`, `set_fp8_state`). Of a model that is
sharded over several ranks, a rank has a shard of each tensor (tensor parallelism), of that some rows (FSDP's DTensors),
and reads and writes those alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from torch import Tensor

from precisionctl.checkpoints.base import Box, Chunk, Chunked, Writer, whole
from precisionctl.checkpoints.output import sync
from precisionctl.fp8.encoding import Encoding
from precisionctl.model_shape import ModelShape
from precisionctl.param import Layout, TensorSpec


@dataclass(frozen=True)
class TensorShard:
    """What a rank has of a tensor that as a whole is `spec`: `boxes`, one below the other, or none."""

    spec: TensorSpec
    boxes: Sequence[Box]


@dataclass(frozen=True)
class LiveModel:
    """Tensors by Megatron name: parameters, or FP32 tensors that stand for them (masters, moments). Of a model that
    tensor or expert ranks share, these are `shards`; a tensor without one is whole."""

    model: ModelShape
    tensors: Mapping[str, Tensor]
    layout: Layout = "megatron"
    encodings: Mapping[str, Encoding] = field(default_factory=dict)
    shards: Mapping[str, TensorShard] = field(default_factory=dict)
    path: None = None
    """It is in memory."""

    @cached_property  # a run asks for it several times a piece
    def specs(self) -> Mapping[str, TensorSpec]:
        specs = {name: shard.spec for name, shard in self.shards.items()}
        for name, tensor in self.tensors.items():
            spec = specs.get(name, TensorSpec(tuple(tensor.shape), tensor.dtype))
            specs[name] = replace(spec, dtype=tensor.dtype)
        return specs

    def chunks(self, name: str) -> Sequence[Chunk]:
        if name not in self.tensors:
            return []
        first, mine = _rows(self.tensors[name])
        boxes = self.shards[name].boxes if name in self.shards else [whole(self.specs[name])]
        found, start = [], 0
        for box in boxes:  # whose first row is number `start` of the rank's own
            top, bottom = max(start, first), min(start + box.rows, first + len(mine))
            if top < bottom:
                part = replace(box, row=box.row + top - start, rows=bottom - top)
                found.append(Chunk(part, mine[top - first : bottom - first]))
            start += box.rows
        return found

    def lay_out(self) -> None:
        """Nothing to do: the tensors are there."""


def _rows(tensor: Tensor) -> tuple[int, Tensor]:
    """The number of the first row that is here of a tensor which FSDP may have cut, and the rows."""
    from torch.distributed.tensor import DTensor  # half a second that files need not wait for

    if not isinstance(tensor, DTensor):
        return 0, tensor.detach()
    mine = tensor.to_local().detach()
    if not mine.numel():
        return 0, mine[:0]
    first = tensor.__create_chunk_list__()[0].offsets[0]  # type: ignore[no-untyped-call]  # as PyTorch's own checkpoints ask for it
    return first, mine


class LazyTensors(Mapping[str, Tensor]):
    """Tensors that are made when they are read. The last one is kept, as it is read piece by piece."""

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = makers
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # before there are two
            self._last = name, self._makers[name]()
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def _copied(chunk: Chunk) -> Tensor:
    assert isinstance(chunk.place, Tensor), "a live model's"
    return chunk.place.detach().to("cpu", copy=True)


@dataclass(frozen=True)
class Snapshot:
    """What a live model had here at one moment, copied into this machine's memory: the model may go on."""

    specs: Mapping[str, TensorSpec]
    held: Mapping[str, Sequence[Chunk]]
    encodings: Mapping[str, Encoding] = field(default_factory=dict)

    @staticmethod
    def of(live: LiveModel) -> "Snapshot":
        """Tensors that are one and the same are copied once; lazy ones, each."""
        copies: dict[int, Sequence[Chunk]] = {}
        held: dict[str, Sequence[Chunk]] = {}
        for name, tensor in live.tensors.items():
            known = {} if isinstance(live.tensors, LazyTensors) else copies
            if id(tensor) not in known:
                known[id(tensor)] = [replace(chunk, place=_copied(chunk)) for chunk in live.chunks(name)]
            held[name] = known[id(tensor)]
        return Snapshot(live.specs, held)

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self.held.get(name, ())


@dataclass(frozen=True)
class LocalRows:
    """The rows of a target that this rank writes: those that are `live` here, in the files of a Writer that the first
    rank has laid out."""

    writer: Writer
    live: Chunked

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self.writer.specs

    def lay_out(self) -> None:
        """Nothing to do: the first rank has."""

    def chunks(self, name: str) -> Sequence[Chunk]:
        return [
            replace(chunk, only=part)
            for chunk in self.writer.chunks(name)
            for here in self.live.chunks(name)
            if (part := chunk.box.intersect(here.box))
        ]

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        for file in {chunk.place for name in self.specs for chunk in self.chunks(name)}:
            assert isinstance(file, Path), "a Writer of files"
            sync(file)
