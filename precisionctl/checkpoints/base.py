"""Readers, Writers and their chunks; how a tensor is cut for tensor parallelism; output by rename.

A Reader or a Writer says, for each logical tensor, which chunks hold it: a box of the tensor and the
place of its bytes. Everything that moves data is arithmetic on those boxes, written once, here and in
`lower.py`: a `torch_dist` chunk, a slice of a stacked tensor, a rank file's shard are all the same thing.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from precisionctl.errors import DamagedCheckpoint, DestinationExists, MissingTensor, ShapeMismatch
from precisionctl.fp8.encoding import Encoding
from precisionctl.fp8.state import Fp8States
from precisionctl.model_shape import ModelShape
from precisionctl.param import Layout, TensorSpec


@dataclass(frozen=True)
class Box:
    """Rows `[row, row + rows)` and columns `[column, column + columns)` of a tensor seen as
    `[shape[0], product of the rest]`."""

    row: int
    rows: int
    column: int
    columns: int

    def intersect(self, other: "Box") -> "Box | None":
        row, column = max(self.row, other.row), max(self.column, other.column)
        rows = min(self.row + self.rows, other.row + other.rows) - row
        columns = min(self.column + self.columns, other.column + other.columns) - column
        return Box(row, rows, column, columns) if rows > 0 and columns > 0 else None


@dataclass(frozen=True)
class Chunk:
    """A box of a logical tensor and where its row-major bytes are.

    `place` is a file, where they start at byte `offset`, or a live tensor of the box's shape.
    """

    box: Box
    place: Path | Tensor
    offset: int = 0


@dataclass(frozen=True)
class Companions:
    """Files that belong to a model but hold none of its tensors, as bytes by file name:
    config.json, generation config, tokenizer, chat template."""

    files: Mapping[str, bytes] = field(default_factory=dict)


class Reader(Protocol):
    """A checkpoint (or a live model) to read from. Opening one reads no tensor data."""

    @property
    def path(self) -> Path | None: ...
    @property
    def container(self) -> str: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def model(self) -> ModelShape: ...
    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...
    @property
    def fp8(self) -> Fp8States | None: ...
    @property
    def encodings(self) -> Mapping[str, Encoding]:
        """How FP8 codes among `specs` decode, by tensor name."""
        ...

    @property
    def companions(self) -> Companions: ...
    @property
    def iteration(self) -> int | None: ...
    @property
    def files(self) -> Sequence[Path]:
        """Every file that holds tensor data; their sizes and times identify the source."""
        ...

    def chunks(self, name: str) -> Sequence[Chunk]: ...


class Writer(Protocol):
    """A checkpoint (or a live model) to write to. `specs` says everything that will be written."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...

    def lay_out(self) -> None:
        """Create every file that holds tensor data at its final size, leaving one that is there as it is."""
        ...

    def chunks(self, name: str) -> Sequence[Chunk]: ...

    def finish(self, fp8: Fp8States | None) -> None:
        """Write what only the end knows (FP8 state, indexes, metadata) and sync it."""
        ...
