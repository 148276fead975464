"""A live model as the source or the target of a conversion: its chunks are its tensors themselves.

It has no files, and its FP8 state is taken and set module by module (`fp8_state`, `set_fp8_state`). Of a model that is
cut for several ranks, a rank has some rows of each tensor (FSDP's DTensors), and reads and writes those alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from torch import Tensor

from precisionctl.checkpoints.base import Chunk, Chunked, Writer, whole
from precisionctl.checkpoints.output import sync
from precisionctl.fp8.encoding import Encoding
from precisionctl.model_shape import ModelShape
from precisionctl.param import Layout, TensorSpec


@dataclass(frozen=True)
class LiveModel:
    """Tensors by Megatron name: parameters, or FP32 tensors that stand for them (masters, moments)."""

    model: ModelShape
    tensors: Mapping[str, Tensor]
    layout: Layout = "megatron"
    encodings: Mapping[str, Encoding] = field(default_factory=dict)

    @cached_property  # a run asks for it several times a piece
    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()}

    def chunks(self, name: str) -> Sequence[Chunk]:
        from torch.distributed.tensor import DTensor  # half a second that files need not wait for

        tensor, box = self.tensors[name], whole(self.specs[name])
        if not isinstance(tensor, DTensor):
            return [Chunk(box, tensor)]
        mine = tensor.to_local().detach()
        if not mine.numel():
            return []
        first = tensor.__create_chunk_list__()[0].offsets[0]  # type: ignore[no-untyped-call]  # as PyTorch's own checkpoints ask for it
        return [Chunk(replace(box, row=first, rows=len(mine)), mine)]

    def lay_out(self) -> None:
        """Nothing to do: the tensors are there."""


class Made(Mapping[str, Tensor]):
    """Tensors that are made when they are asked for. The last one is kept: it is asked for piece by piece."""

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


@dataclass(frozen=True)
class Snapshot:
    """What a live model had here at one moment, copied into this machine's memory: the model may go on."""

    specs: Mapping[str, TensorSpec]
    held: Mapping[str, Sequence[Chunk]]
    encodings: Mapping[str, Encoding] = field(default_factory=dict)

    @staticmethod
    def of(live: LiveModel) -> "Snapshot":
        """Tensors that are one and the same are copied once."""
        copies: dict[tuple[object, ...], Tensor] = {}
        made = isinstance(live.tensors, Made)  # each is another, and may be where one was that is gone

        def copied(chunk: Chunk) -> Chunk:
            assert isinstance(chunk.place, Tensor), "a live model's"
            here = chunk.place.detach()
            key = (here.data_ptr(), here.dtype, here.shape)
            if made or key not in copies:
                copies[key] = here.to("cpu", copy=True)
            return replace(chunk, place=copies[key])

        return Snapshot(live.specs, {name: [copied(chunk) for chunk in live.chunks(name)] for name in live.specs})

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self.held[name]


@dataclass(frozen=True)
class RowsOf:
    """Of a Writer's files, which are laid out, the rows of each tensor that is live here."""

    writer: Writer
    live: Chunked

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self.writer.specs

    def lay_out(self) -> None:
        """Nothing to do: the first rank has."""

    def chunks(self, name: str) -> Sequence[Chunk]:
        itemsize = self.specs[name].dtype.itemsize
        return [
            replace(chunk, box=part, offset=chunk.offset + (part.row - chunk.box.row) * part.columns * itemsize)
            for chunk in self.writer.chunks(name)
            for here in self.live.chunks(name)
            if (part := chunk.box.intersect(here.box))
        ]

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        for file in {chunk.place for name in self.specs for chunk in self.chunks(name)}:
            assert isinstance(file, Path), "a Writer of files"
            sync(file)
