"""The digest of a model's weights, which shows whether FP8 state or a fixed scale was recorded with these weights.

It is computed in Megatron's layout from values rounded to BF16, so it is the same for the same weights in every
container and layout, sharded and padded for any ranks, in FP32, FP16 or BF16, or as codes that decode to them.

A digest of all bytes would cost as much as the conversion, so it samples a few rows of each matrix, and reads vectors
completely. A training step, a merge, rescaled channels or another rounding change what is sampled. An edit of single
rows may not; but scales of weights do not depend on the digest, as they are checked against the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Protocol

from precisionctl.architectures.rearrangements import Vocabulary
from precisionctl.checkpoints.base import TensorSource
from precisionctl.checkpoints.chunks import Chunk, Chunked
from precisionctl.codes.encoding import Encoding
from precisionctl.conversion.worker import Nowhere, Worker
from precisionctl.dtypes import DType
from precisionctl.param import TensorSpec
from precisionctl.planning.make_plan import PlanSource, plan_weights
from precisionctl.planning.plan import Job, Plan
from precisionctl.planning.segments import Segment
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 4
"""Rows sampled from each matrix: the first, the last, and some between."""


class Weights(PlanSource, TensorSource, Protocol):
    """The part of a Reader that a digest needs."""


def digest_weights(reader: Weights) -> str:
    """The digest of an open checkpoint's weights, of a wrapper those of its text model: SHA-256 in hexadecimal. Raises
    as `plan_weights` and `read_rows`."""
    return _digest(plan_weights(reader).text, reader)


def digest_written(plan: Plan, written: Chunked) -> str:
    """As `digest_weights`, of values that a plan in Megatron's layout has written and that are not yet a complete
    checkpoint."""
    return _digest(plan, _Values(written.specs, written.chunks))


@dataclass(frozen=True)
class _Values:
    """A source of tensors without codes."""

    specs: Mapping[str, TensorSpec]
    chunks: Callable[[str], Sequence[Chunk]]
    encodings: Mapping[str, Encoding] = field(default_factory=dict)


def _digest(plan: Plan, source: TensorSource) -> str:
    sampler, total = _Sampler(plan, source, Nowhere(plan.targets)), sha256()
    for job in sorted(plan.jobs, key=lambda job: job.name):
        for name, values in sampler.samples(job):
            if bool(values.any()):  # biases of zeros exist only in one of the layouts
                total.update(f"{name}\n".encode())
                total.update(values.to(torch.bfloat16).view(torch.uint8).numpy().data)
    return total.hexdigest()


class _Sampler(Worker):
    """Computes a few rows of what jobs would write."""

    def samples(self, job: Job) -> Iterator[tuple[str, Tensor]]:
        """The sampled rows `[rows, columns]` of each tensor that a job writes, with its name. The padding of a
        vocabulary is not sampled."""
        plan = self._plan
        rows = {name: self._sampled(job, name) for name in job.writes}
        if job.writes and plan.computes(job):
            made = plan.compute(job, [self._whole(name, DType.float32) for name in job.reads])
            for name, tensor in zip(job.writes, made, strict=False):
                yield name, tensor.reshape(plan.targets[name].rows, -1)[rows[name]]
            return
        found = {name: torch.zeros(len(rows[name]), plan.targets[name].columns) for name in job.writes}
        for segment in self._segments(job) if job.writes else ():
            for part in self._within(segment, rows[segment.write]):
                first = rows[segment.write].index(part.write_row)
                for _, row, values in self._moved(part):
                    start = first + row - part.write_row
                    found[segment.write][start : start + len(values)] = values
        yield from found.items()

    def _within(self, segment: Segment, rows: range | list[int]) -> Iterator[Segment]:
        """The parts of a segment that write these rows."""
        first, last = segment.write_row, segment.write_row + segment.rows
        if isinstance(rows, range):
            runs = [(max(first, rows.start), min(last, rows.stop))]
        else:
            runs = [(row, row + 1) for row in rows if first <= row < last]
        for start, stop in runs:
            if start < stop:
                yield replace(segment, read_row=segment.read_row + start - first, write_row=start, rows=stop - start)

    def _sampled(self, job: Job, name: str) -> range | list[int]:
        """The numbers of the rows to sample from a tensor."""
        spec = self._plan.targets[name]
        rows = spec.rows
        if self._plan.to_layout == "megatron" and isinstance(job.row.rearrangement, Vocabulary):
            rows = min(rows, getattr(self._plan.model, job.row.rearrangement.tokens))
        if spec.columns == 1:
            return range(rows)
        return sorted({number * (rows - 1) // (_ROWS - 1) for number in range(_ROWS)})
