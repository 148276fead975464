"""A checkpoint's tensors by Hugging Face name, whatever its layout: read in pieces, as stored and as values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from precisionctl.checkpoints.base import HasCasts, TensorSource
from precisionctl.checkpoints.chunks import Bytes, bytes_of, in_pieces, read_bytes, read_tensor, read_values
from precisionctl.codes import numerics
from precisionctl.codes.elements import Cast, Element
from precisionctl.codes.encoding import Encoding, joined
from precisionctl.codes.four_bit_loss import most_zeros
from precisionctl.dtypes import DType
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import TensorSpec
from precisionctl.planning.plan import Job, Plan
from precisionctl.planning.segments import Segment, lower
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 1 << 20
"""Elements to read at a time."""


@dataclass(frozen=True)
class StoredRows:
    """Rows of a tensor as they are stored: bytes, `[n, width * itemsize]`, and their dtype. Where they are codes,
    `encoding` is that of these rows; where they are values that were read of ggml's or MLX's codes, `cast` makes such
    of values."""

    data: Bytes
    dtype: DType
    encoding: Encoding | None
    cast: Cast | None = None

    @staticmethod
    def of(values: Tensor) -> StoredRows:
        """Values `[n, columns]` as they would be stored in their dtype."""
        return StoredRows(bytes_of(values), DType.of(values.dtype), None)

    @property
    def is_codes(self) -> bool:
        """Whether the rows are codes, or were read of ggml's or MLX's."""
        return self.encoding is not None or self.cast is not None

    @property
    def stored(self) -> Tensor:
        """The rows as a tensor, `[n, width]`."""
        return torch.from_numpy(self.data).view(self.dtype.torch)

    @cached_property
    def values(self) -> Tensor:
        """The decoded values of the rows, FP32 `[n, columns]`, which nobody may change."""
        return self.stored.float() if self.encoding is None else self.encoding.decode_rows(self.stored, 0)

    def same_bytes(self, other: StoredRows) -> bool:
        """Whether both are values of one dtype, and equal bit for bit."""
        plain = self.encoding is None and other.encoding is None and self.dtype == other.dtype
        return plain and np.array_equal(self.data, other.data)

    def encodes(self, values: Tensor) -> bool:
        """Whether these codes are the encoding of FP32 `values`: under the scales stored with them, or under those that
        ggml or MLX takes. What is no number has no code but one of the same: infinity is not the largest code."""
        if not (numerics.are_finite(values) and numerics.are_finite(self.values)):
            for is_none in (torch.isnan, torch.isinf):
                if not torch.equal(is_none(values), is_none(self.values)):
                    return False
        if self.cast is not None:
            return torch.equal(self.cast.rounded(values).view(torch.int32), self.values.view(torch.int32))
        if self.encoding is None:
            return False
        codes = self.encoding.encode_rows(values, 0)
        if torch.equal(codes.view(torch.uint8), torch.from_numpy(self.data)):
            return True
        return torch.equal(self.encoding.decode_rows(codes, 0), self.values)  # ggml has no negative zero


class HfTensors:
    """A checkpoint's tensors under the names that `plan` gives them: Hugging Face's, whatever its layout, or its own.

    `copies` are tensors that the checkpoint stores although they are copies of others (the `lm_head` of a tied model):
    the name of the copy, and the name of the original. They are among `specs`.
    """

    def __init__(self, reader: TensorSource, plan: Plan) -> None:
        self.reader, self.plan = reader, plan
        self._kept: tuple[str, Tensor] | None = None
        self._mixed: dict[str, bool] = {}
        self.specs: dict[str, TensorSpec] = dict(plan.targets)
        self._segments: dict[str, list[Segment]] = {name: [] for name in plan.targets}
        self._computed: dict[str, tuple[Job, int]] = {}
        self._extras = [name for job in plan.jobs if not job.writes for name in job.reads]
        for job in plan.jobs:
            if plan.computes(job):
                self._computed |= {name: (job, number) for number, name in enumerate(job.writes)}
                continue
            reads = {read: reader.specs[read].rows for read in job.reads}
            for segment in lower(job.row, plan.model, plan.from_layout, plan.to_layout, reads, job.writes):
                self._segments[segment.write].append(segment)
        self.copies = {copy: job.writes[0] for job in plan.jobs for copy in job.copies}
        for copy in self.copies:
            spec = reader.specs[copy]
            self.specs[copy] = spec
            self._segments[copy] = [Segment(copy, 0, copy, 0, spec.rows)]

    @classmethod
    def as_stored(cls, reader: TensorSource, model: ModelShape, specs: Mapping[str, TensorSpec]) -> HfTensors:
        """Tensors by the names that the checkpoint itself has for them, of each as many rows as `specs` say."""
        tensors = cls(reader, Plan(model, "hf", "hf", (), specs))
        for name, spec in specs.items():  # without a job for each: an optimizer has 100,000 of them
            tensors._segments[name].append(Segment(name, 0, name, 0, spec.rows))
        return tensors

    def add_copy(self, name: str, of: str) -> None:
        """Take a tensor that this checkpoint does not store for what it would be a copy of, if it has that."""
        if name in self.specs or of not in self.specs:
            return
        self.specs[name], self._segments[name] = self.specs[of], self._segments[of]
        if of in self._computed:
            self._computed[name] = self._computed[of]

    def extras(self) -> dict[str, Tensor]:
        """Biases that Hugging Face has no place for, by their own names; a conversion leaves out those that are
        zero."""
        return {name: read_tensor(self.reader, name) for name in self._extras}

    def stored_dtype(self, name: str) -> str:
        """The dtype of a tensor of the checkpoint, by its own name there, or the codes that it is decoded from."""
        codes = self.reader.decoded_from(name) if isinstance(self.reader, HasCasts) else ""
        return codes or self.reader.specs[name].stored_dtype

    def block(self, name: str) -> tuple[int, int]:
        """How many rows and columns of a tensor of codes, or of ggml's or MLX's, share a scale: of those that are read
        in several pieces, as many as always do."""
        if cast := self.cast(name):
            spec = self.specs[name]
            return (1, cast.share_a_scale) if cast.share_a_scale else (spec.rows, spec.columns)
        high, wide = 0, 0
        for segment in self._segments[name]:
            if segment.read is not None:
                block = self.reader.encodings[segment.read].block
                high, wide = gcd(high, block[0], segment.read_row, segment.write_row), gcd(wide, block[1])
        return high, wide

    def most_zeros(self, name: str) -> float | None:
        """The share of values that become zero above which outliers spoil the scales of a tensor of codes; None if that
        is not known of such codes."""
        of_parts = [self.reader.encodings[read] for read in dict.fromkeys(self._reads(name)) if self.is_codes(name)]
        limits = {most_zeros(each.element, each.block, zero_points=each.zeros is not None) for each in of_parts}
        return limits.pop() if len(limits) == 1 else None

    def is_packed(self, name: str) -> bool:
        """Whether the codes are not FP8."""
        packed = any(segment.read and self.reader.specs[segment.read].packing for segment in self._segments[name])
        return packed or self.cast(name) is not None

    def cast(self, name: str) -> Cast | None:
        """How ggml or MLX makes the codes of all rows of a tensor; None where they are no such codes."""
        if not isinstance(self.reader, HasCasts) or name in self._computed:
            return None
        found = {self.reader.cast(segment.read) if segment.read else None for segment in self._segments[name]}
        return found.pop() if len(found) == 1 else None

    def rows_together(self, name: str) -> int:
        """How many rows of a tensor must be read at once, or a multiple of that, to say whether it is the codes of
        another."""
        cast = self.cast(name)
        return cast.rows_together if cast else 1

    def is_codes(self, name: str) -> bool:
        """Whether the rows of a tensor are read as codes, with their scales."""
        return self._has_codes(name) and not self._is_of_values(name)

    def has_codes_as_values(self, name: str) -> bool:
        """Whether codes are among what a tensor is made of, though it is read as values."""
        return self._has_codes(name) and self._is_of_values(name)

    def _has_codes(self, name: str) -> bool:
        return any(read in self.reader.encodings for read in self._reads(name))

    def _is_of_values(self, name: str) -> bool:
        """Whether a tensor has no bytes of its own: it is computed, or its rows are stored in several dtypes or number
        formats."""
        if name not in self._mixed:
            kinds = set[tuple[DType, Element | None]]()  # the element where rows are codes
            for segment in self._segments[name]:
                spec = self.specs[name] if segment.read is None else self.reader.specs[segment.read]
                kinds.add((spec.dtype, spec.element if segment.read in self.reader.encodings else None))
            self._mixed[name] = name in self._computed or len(kinds) > 1
        return self._mixed[name]

    def _reads(self, name: str) -> Sequence[str]:
        """The names of what a tensor is made of in the checkpoint."""
        if name in self._computed:
            return self._computed[name][0].reads
        return [segment.read for segment in self._segments.get(name, ()) if segment.read is not None]

    def dtype(self, name: str) -> str:
        """What a tensor is stored in; `specs` has the dtype after decoding."""
        return " and ".join(dict.fromkeys(map(self.stored_dtype, self._reads(name)))) or "zeros"

    def nbytes(self, name: str) -> int:
        """How many bytes of a tensor the checkpoint stores; 0 where it has none."""
        specs = self.reader.specs
        if name in self._computed:
            job, _ = self._computed[name]
            return sum(specs[read].nbytes for read in job.reads) // len(job.writes)
        stored = [(segment.rows, segment.read) for segment in self._segments.get(name, ()) if segment.read is not None]
        return sum(rows * specs[read].width * specs[read].dtype.itemsize for rows, read in stored)

    def pieces(self, name: str, together: int = 1) -> Iterator[tuple[int, int]]:
        """The first row of each piece of a tensor, and how many rows it has, to be read one after the other. A piece
        has a multiple of the rows that are to be read `together`."""
        spec = self.specs[name]
        for first, count in in_pieces(0, -(-spec.rows // together), spec.columns * together, PIECE):
            yield first * together, min(count * together, spec.rows - first * together)

    def read(self, name: str, row: int, rows: int) -> StoredRows:
        """Rows `[row, row + rows)` of a tensor."""
        if name in self._computed:
            values = self._compute(name).reshape(self.specs[name].rows, self.specs[name].columns)
            return StoredRows.of(values[row : row + rows])
        parts = [part for segment in self._segments[name] if (part := self._part(segment, row, rows)) is not None]
        if self._is_of_values(name):
            return StoredRows.of(torch.cat([part.stored if part.encoding is None else part.values for part in parts]))
        encodings = [part.encoding for part in parts if part.encoding is not None]
        encoding = joined(encodings, self.specs[name].columns) if encodings else None
        data = parts[0].data if len(parts) == 1 else np.concatenate([part.data for part in parts])
        return StoredRows(data, parts[0].dtype, encoding, self.cast(name))

    def _compute(self, name: str) -> Tensor:
        """A tensor that is computed from stored ones. The last is kept, since callers read piece by piece."""
        if self._kept is None or self._kept[0] != name:
            (job, number), specs, encodings = self._computed[name], self.reader.specs, self.reader.encodings
            values = [read_values(self.reader, encodings, read).reshape(specs[read].shape) for read in job.reads]
            self._kept = name, self.plan.compute(job, values)[number]
        return self._kept[1]

    def _part(self, segment: Segment, row: int, rows: int) -> StoredRows | None:
        """The rows among `[row, row + rows)` that a segment gives; None if there are none."""
        first = max(row, segment.write_row)
        count = min(row + rows, segment.write_row + segment.rows) - first
        if count <= 0:
            return None
        if segment.read is None:
            spec = self.specs[segment.write]
            return StoredRows(np.zeros((count, spec.columns * spec.dtype.itemsize), np.uint8), spec.dtype, None)
        start = segment.read_row + first - segment.write_row
        stored, dtype = read_bytes(self.reader, segment.read, start, count), self.reader.specs[segment.read].dtype
        encoding = self.reader.encodings.get(segment.read)
        return StoredRows(stored, dtype, None if encoding is None else encoding.of_rows(start, count))
