"""A worker's memory: buffers for one piece of a tensor, so that it does not grow with the model."""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from precisionctl.checkpoints.base import in_pieces
from precisionctl.fp8 import nibbles
from precisionctl.fp8.encoding import grid_shape
from precisionctl.planning.plan import Job, Plan

BUFFER = 4 << 20
"""Bytes moved at a time. With 1 MiB an export took a tenth longer, for the Python around each piece; larger ones gain
nothing more and leave a core's own cache."""

WIDEST = 4
"""Bytes of FP32, the widest dtype that a value has on its way."""


class Buffers:
    """Bytes as they are read, what they decode to, bytes to be written, and FP32 `scratch` for what is computed in
    between."""

    def __init__(self) -> None:
        self._read = torch.empty(BUFFER, dtype=torch.uint8)
        self._decoded = torch.empty(BUFFER, dtype=torch.uint8)
        self._write = torch.empty(BUFFER, dtype=torch.uint8)
        self.scratch = torch.empty(nibbles.SCRATCH)

    def pieces(self, row: int, rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
        """Rows `[row, row + rows)` in runs that fit a buffer: as `in_pieces` cuts them."""
        return in_pieces(row, rows, row_bytes, self._read.numel())

    def to_read(self, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
        """`[rows, columns]`, uninitialized; the next call gives the same memory again."""
        return _view(self._read, dtype, rows, columns)

    def to_decode(self, rows: int, columns: int) -> Tensor:
        """The same in FP32, of another buffer."""
        return _view(self._decoded, torch.float32, rows, columns)

    def to_write(self, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
        """The same of a third buffer."""
        return _view(self._write, dtype, rows, columns)


def _view(buffer: Tensor, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """The start of a byte buffer as `[rows, columns]`; fresh memory for a single row that is too long for it."""
    size = rows * columns * dtype.itemsize
    if size > buffer.numel():
        buffer = torch.empty(size, dtype=torch.uint8)
    return buffer[:size].view(dtype).view(rows, columns)


_BLOCK = 17
"""Bytes that BlockScales hold for each block: amax, candidate, misfit and scale in FP32, and whether it fits."""


def worker_memory(plan: Plan) -> int:
    """The most bytes that one worker holds while it carries out a plan: its buffers, or one row of a tensor whose rows
    are longer than they; the whole of a tensor that is computed rather than moved, read and made, in FP32 at worst, and
    from one spelling of Hugging Face to another by way of Megatron's; and where it encodes, what a piece becomes on the
    way there and back, and the grids of scales."""
    rows = [spec.columns * max(WIDEST, spec.dtype.itemsize) for spec in plan.targets.values()]
    copies = 4 if plan.source == plan.target else 2
    computed = [copies * WIDEST * _elements(job, plan) for job in plan.jobs if plan.computes(job)]
    encoded = [6 * BUFFER + _BLOCK * _blocks(job, plan) for job in plan.jobs if job.encode]
    return 3 * max(BUFFER, *rows) + WIDEST * nibbles.SCRATCH + max(computed, default=0) + max(encoded, default=0)


def _elements(job: Job, plan: Plan) -> int:
    return sum(plan.targets[name].rows * plan.targets[name].columns for name in job.writes)


def _blocks(job: Job, plan: Plan) -> int:
    """How many blocks with a scale of their own the tensors have that a job encodes."""
    weights = job.encode.weights if job.encode else {}
    specs = ((plan.targets[name], scales.block) for name, scales in weights.items())
    return sum(prod(grid_shape(spec.rows, spec.columns, block)) for spec, block in specs)
