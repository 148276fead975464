"""A worker's memory: buffers for one piece of a tensor, so that memory does not grow with the model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from precisionctl.checkpoints.chunks import Bytes, in_pieces
from precisionctl.codes import nibbles
from precisionctl.codes.encoding import grid_shape
from precisionctl.dtypes import DType
from precisionctl.planning.plan import Plan
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

BUFFER = 4 << 20
"""Bytes moved at a time. With 1 MiB an export took a tenth longer, because of the Python code for each piece; larger
buffers gain nothing and do not fit a core's cache."""

WIDEST = 4
"""Bytes of an element in FP32, the widest dtype that values are computed in."""


class Buffers:
    """Reused buffers: for bytes as read, for decoded values, for bytes to write, and FP32 `scratch` for casts."""

    def __init__(self) -> None:
        self._read, self._decoded, self._write = (np.empty(BUFFER, np.uint8) for _ in range(3))

    @cached_property  # what only copies bytes needs no PyTorch
    def scratch(self) -> Tensor:
        return torch.empty(nibbles.SCRATCH)

    def pieces(self, row: int, rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
        """Rows `[row, row + rows)` of `row_bytes` each in runs that fit a buffer, as from `in_pieces`."""
        return in_pieces(row, rows, row_bytes, self._read.size)

    def to_copy(self, rows: int, row_bytes: int) -> Bytes:
        """The buffer for what is read, as uninitialized bytes `[rows, row_bytes]`. The next call returns the same
        memory, and so does `to_read`."""
        return _start(self._read, rows * row_bytes).reshape(rows, row_bytes)

    def to_read(self, dtype: DType, rows: int, columns: int) -> Tensor:
        """The buffer for what is read, as an uninitialized tensor `[rows, columns]`. The next call returns the same
        memory, and so does `to_copy`."""
        return _view(self._read, dtype, rows, columns)

    def to_decode(self, rows: int, columns: int) -> Tensor:
        """The buffer for decoded values, as an uninitialized FP32 tensor `[rows, columns]`. The next call returns the
        same memory."""
        return _view(self._decoded, DType.float32, rows, columns)

    def to_write(self, dtype: DType, rows: int, columns: int) -> Tensor:
        """The buffer for what is written, as an uninitialized tensor `[rows, columns]`. The next call returns the same
        memory."""
        return _view(self._write, dtype, rows, columns)


def _start(buffer: Bytes, size: int) -> Bytes:
    """The start of a buffer; new memory for a single row that is longer than the buffer."""
    return buffer[:size] if size <= buffer.size else np.empty(size, np.uint8)


def _view(buffer: Bytes, dtype: DType, rows: int, columns: int) -> Tensor:
    start = _start(buffer, rows * columns * dtype.itemsize)
    return torch.from_numpy(start).view(dtype.torch).view(rows, columns)


_BLOCK = 17
"""Bytes that BlockScales takes for each block: amax, candidate, misfit and scale in FP32, and whether it fits."""


def worker_memory(plan: Plan) -> int:
    """The most bytes that one worker allocates while it carries out a plan."""
    rows = [spec.columns * max(WIDEST, spec.dtype.itemsize) for spec in plan.targets.values()]
    # A job that computes has whole tensors in memory: those it read and those it made. Between two Hugging Face
    # directories, Megatron's are made in between.
    copies = 4 if plan.from_layout == plan.to_layout else 2
    computed = [
        copies * WIDEST * sum(plan.targets[name].rows * plan.targets[name].columns for name in job.writes)
        for job in plan.jobs
        if plan.computes(job)
    ]
    encoded = []
    for codes in (job.codes for job in plan.jobs if job.codes):
        measured = ((plan.targets[name], scales.block) for name, scales in codes.measured.items())
        blocks = sum(prod(grid_shape(spec.rows, spec.columns, block)) for spec, block in measured)
        encoded.append(6 * BUFFER + _BLOCK * blocks)
    return 3 * max(BUFFER, *rows) + WIDEST * nibbles.SCRATCH + max(computed, default=0) + max(encoded, default=0)
