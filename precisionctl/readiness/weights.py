"""Statistics of every element of a checkpoint's weights, in bounded memory and for any format.

The blocks of block scaling are those of Megatron's tensors, in which q, k and v, and gate and up, are fused. So the
tensors are mapped to Megatron's while they are read, as in a conversion.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.chunks import Bytes
from precisionctl.codes import nibbles, numerics
from precisionctl.codes.four_bit_loss import FORMATS, FourBitScheme, four_bit_losses
from precisionctl.codes.health import measure
from precisionctl.codes.numerics import BLOCK
from precisionctl.codes.statistics import Loss, Statistics
from precisionctl.conversion.worker import Nowhere, Worker
from precisionctl.fp8.state import DelayedScaling, Fp8States
from precisionctl.planning.plan import Job, Plan
from precisionctl.processes import in_processes
from precisionctl.torch_when_used import one_torch_thread


@dataclass(frozen=True)
class MeasuredWeight:
    """Statistics of every element of a weight, and what four bits would lose of one row in SAMPLED."""

    statistics: Statistics
    four_bits: Mapping[FourBitScheme, Loss]


SAMPLED = 8
"""Four bits take twice the time of all else that is measured, and a sum over an eighth of a weight is as telling."""


class _RowObserver(Worker, ABC):
    """Shows the rows that a job would write, in order, to `_observe`."""

    def _put(self, name: str, row: int, values: Tensor | Bytes) -> None:
        stored = self._writer.specs[name].dtype.torch
        self._observe(values if isinstance(values, Tensor) else torch.from_numpy(values).view(stored))

    @abstractmethod
    def _observe(self, values: Tensor) -> None:
        """Called with the next rows."""


class _Amax(_RowObserver):
    """Computes the amax of the tensor that a job would write."""

    def amax(self, job: Job) -> Tensor:
        self._largest = torch.zeros(())
        self.do(job)
        return self._largest

    def _observe(self, values: Tensor) -> None:
        self._largest = torch.maximum(self._largest, numerics.amax(values))


class _Measurer(_RowObserver):
    """Measures the tensor that a job would write. Rows arrive in order, in pieces that depend on the format; they are
    regrouped into steps of fixed size, so that sums are the same to the last bit for every format."""

    def measure(self, job: Job, amax: Tensor, delayed_scale: Tensor | None) -> MeasuredWeight:
        self._amax, self._delayed_scale = amax, delayed_scale
        self._statistics, self._waiting = Statistics(), torch.empty(0)
        self._four_bits = dict.fromkeys(FORMATS, Loss())
        self.do(job)
        if len(self._waiting):
            self._measure_first(len(self._waiting))
        return MeasuredWeight(self._statistics, self._four_bits)

    def _observe(self, values: Tensor) -> None:
        self._waiting = torch.cat([self._waiting, values]) if len(self._waiting) else values.clone()  # of a buffer
        step = max(1, _AT_ONCE // (values.shape[1] * BLOCK)) * BLOCK
        while len(self._waiting) >= step:
            self._measure_first(step)

    def _measure_first(self, rows: int) -> None:
        first, self._waiting = self._waiting[:rows], self._waiting[rows:]
        found = measure(first, _CODES, self._delayed_scale, square=True, amax=self._amax)
        self._statistics = self._statistics.merge(found)
        lost = four_bit_losses(first[::SAMPLED], self._amax.float(), torch.empty(nibbles.SCRATCH))
        self._four_bits = {scheme: self._four_bits[scheme] + lost[scheme] for scheme in FORMATS}


_CODES = DelayedScaling().dtype("weight")
_AT_ONCE = 1 << 20
"""About how many elements are measured in one step; at least 128 rows."""


def stored_bytes(reader: Reader, jobs: Sequence[Job]) -> int:
    """The bytes of the stored tensors of these jobs, each counted once."""
    return sum(reader.specs[name].nbytes for job in jobs for name in job.reads)


def measure_weights(
    reader: Reader,
    plan: Plan,
    jobs: Sequence[Job],
    states: Fp8States | None,
    *,
    workers: int,
    on_bytes: Callable[[int], None],
) -> dict[str, list[MeasuredWeight]]:
    """The measurements of each FP8 GEMM's weight, by module: one, or one for each expert.

    Delayed scaling is measured with the scale of `states`, if one was recorded. `on_bytes` is called with the number of
    stored bytes that were just measured; `workers` is the number of processes.
    """
    nowhere = Nowhere(plan.targets)
    first, second = _Amax(plan, reader, nowhere), _Measurer(plan, reader, nowhere)
    scales: dict[str, Tensor | None] = {}
    seen: Counter[str] = Counter()  # the jobs of a module's experts come in the order of the experts
    for job in jobs:
        state = states.modules.get(job.module) if states else None
        part = state.roles.get("weight") if state else None
        expert = seen[job.module]
        recorded = part is not None and bool(part.recorded_each.reshape(-1)[expert])
        scales[job.name] = part.scale.reshape(-1)[expert] if part is not None and recorded else None
        seen[job.module] += 1
    results = in_processes(
        lambda job: second.measure(job, first.amax(job), scales[job.name]),
        jobs,
        [plan.job_bytes(job) for job in jobs],
        workers,
    )
    found: dict[str, MeasuredWeight] = {}
    with one_torch_thread(), closing(results):
        for job, measured in results:
            found[job.name] = measured
            on_bytes(stored_bytes(reader, (job,)))
    by_module: dict[str, list[MeasuredWeight]] = {}
    for job in jobs:
        by_module.setdefault(job.module, []).append(found[job.name])
    return by_module
