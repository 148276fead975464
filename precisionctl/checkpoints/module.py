"""A live model as the source or the target of a conversion: its chunks are its tensors.

It has no files, and its FP8 state is read and set module by module (`fp8_state`, `set_fp8_state`). In a model that is
distributed over ranks, a rank has a shard of each tensor (tensor parallelism) and of that some rows (FSDP's DTensors).
It reads and writes only those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from precisionctl.checkpoints.base import Writer
from precisionctl.checkpoints.chunks import Box, Chunk, Chunked, chunk_files, whole
from precisionctl.checkpoints.output import sync_all
from precisionctl.codes.encoding import Encoding
from precisionctl.dtypes import DType
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import Layout, TensorSpec
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TensorShard:
    """A rank's shard of a tensor whose spec as a whole is `spec`: `boxes`, one below the other in the rank's memory;
    empty if it has none."""

    spec: TensorSpec
    boxes: Sequence[Box]


@dataclass(frozen=True)
class LiveModel:
    """Tensors by Megatron name: parameters, or FP32 tensors of their shape (master weights, moments). In a model with
    tensor or expert parallelism, `shards` says which part of the whole each is; a tensor without an entry is whole."""

    model: ModelShape
    tensors: Mapping[str, Tensor]
    shards: Mapping[str, TensorShard] = field(default_factory=dict)

    layout: ClassVar[Layout] = "megatron"
    encodings: ClassVar[Mapping[str, Encoding]] = MappingProxyType({})
    path: ClassVar[None] = None
    """None: the model is in memory."""

    @cached_property  # it is used several times for each piece that is copied
    def specs(self) -> Mapping[str, TensorSpec]:
        specs = {name: shard.spec for name, shard in self.shards.items()}
        for name, tensor in self.tensors.items():
            spec = specs.get(name, TensorSpec(tuple(tensor.shape), DType.of(tensor.dtype)))
            specs[name] = replace(spec, dtype=DType.of(tensor.dtype))
        return specs

    def chunks(self, name: str) -> Sequence[Chunk]:
        if name not in self.tensors:
            return []
        first, mine = local_rows(self.tensors[name])
        mine = mine if mine.dim() else mine[None]  # a scalar is one row
        boxes = self.shards[name].boxes if name in self.shards else [whole(self.specs[name])]
        found, start = [], 0
        for box in boxes:  # its first row is number `start` among the rank's rows
            top, bottom = max(start, first), min(start + box.rows, first + len(mine))
            if top < bottom:
                part = replace(box, row=box.row + top - start, rows=bottom - top)
                found.append(Chunk(part, mine[top - first : bottom - first]))
            start += box.rows
        return found

    def lay_out(self) -> None:
        """Nothing to do: the tensors are there."""


def local_rows(tensor: Tensor) -> tuple[int, Tensor]:
    """The rows of a tensor that this process has, and the number of the first: all of them unless FSDP cut it."""
    from torch.distributed.tensor import DTensor  # takes half a second to import, which conversions of files save

    if not isinstance(tensor, DTensor):
        return 0, tensor.detach()
    mine = tensor.to_local().detach()
    if not mine.numel():
        return 0, mine[:0]
    first = tensor.__create_chunk_list__()[0].offsets[0]  # type: ignore[no-untyped-call]  # as PyTorch's own checkpoints ask for it
    return first, mine


class LazyTensors(Mapping[str, "Tensor"]):
    """Tensors that are computed when they are read. The last one is kept, as tensors are read piece by piece."""

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = makers
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # frees the last one first, so that there are never two in memory
            self._last = name, self._makers[name]()
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


@dataclass(frozen=True)
class Snapshot:
    """A copy in CPU memory of this rank's tensors of a live model at one moment, so that the model can train on."""

    specs: Mapping[str, TensorSpec]
    held: Mapping[str, Sequence[Chunk]]

    encodings: ClassVar[Mapping[str, Encoding]] = MappingProxyType({})

    @staticmethod
    def of(live: LiveModel) -> Snapshot:
        """Copy a model's tensors. One that is there under several names is copied once, unless tensors are lazy."""
        copies: dict[int, Sequence[Chunk]] = {}
        held: dict[str, Sequence[Chunk]] = {}
        for name, tensor in live.tensors.items():
            known = {} if isinstance(live.tensors, LazyTensors) else copies
            if id(tensor) not in known:
                chunks = []
                for chunk in live.chunks(name):
                    assert isinstance(chunk.place, torch.Tensor), "the chunks of a live model are tensors"
                    chunks.append(replace(chunk, place=chunk.place.detach().to("cpu", copy=True)))
                known[id(tensor)] = chunks
            held[name] = known[id(tensor)]
        return Snapshot(live.specs, held)

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self.held.get(name, ())


@dataclass(frozen=True)
class LocalRows:
    """The part of a Writer's target that this rank writes: the rows that it has in `live`. The first rank has created
    the files."""

    writer: Writer
    live: Chunked

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self.writer.specs

    def lay_out(self) -> None:
        """Nothing to do: the first rank has created the files."""

    def chunks(self, name: str) -> Sequence[Chunk]:
        return [
            replace(chunk, only=part)
            for chunk in self.writer.chunks(name)
            for here in self.live.chunks(name)
            if (part := chunk.box.intersect(here.box))
        ]

    def sync(self) -> None:
        """Sync the files that this rank has written to the disk."""
        sync_all(chunk_files(self, self.specs))
