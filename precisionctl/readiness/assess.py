"""A checkpoint, assessed: its weights measured, and what its FP8 state, or another file's, recorded of the rest."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from precisionctl.checkpoints.base import Reader
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Fp8States
from precisionctl.readiness.judge import Readiness, judge
from precisionctl.readiness.weights import measure_weights, plan_gemms, stored_bytes

Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Given how many bytes there are, what hears of those that are done."""


def assess(reader: Reader, state_file: Path | None, progress: Progress, workers: int = 1) -> Readiness:
    """Measure every weight of an FP8 GEMM and judge. `state_file` is a sidecar that stands for the checkpoint's own
    FP8 state. Raises as make_plan does, and as sidecar.read."""
    states = sidecar.read(state_file) if state_file else states_of(reader)
    plan, jobs = plan_gemms(reader)
    with progress(stored_bytes(reader, jobs)) as on_bytes:
        weights = measure_weights(reader, plan, jobs, states, workers=workers, on_bytes=on_bytes)
    return judge(list(dict.fromkeys(job.module for job in jobs)), weights, states)


def states_of(reader: Reader) -> Fp8States | None:
    """The checkpoint's state, with the statistics of its sidecar, which TE's payloads have no place for."""
    states = reader.fp8
    if states is None or states.statistics or reader.path is None:
        return states
    beside = sidecar.find(reader.path)
    return replace(states, statistics=beside.statistics) if beside else states
