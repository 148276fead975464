"""A checkpoint, assessed: its weights measured, and what its FP8 state, or another file's, recorded of the rest."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from precisionctl.checkpoints.base import Reader
from precisionctl.fp8 import sidecar
from precisionctl.readiness.judge import Readiness, judge
from precisionctl.readiness.weights import measure_weights, plan_gemms, stored_bytes

Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Given how many bytes there are, what hears of those that are done."""


def assess(reader: Reader, state_file: Path | None, progress: Progress, workers: int = 1) -> Readiness:
    """Measure every weight of an FP8 GEMM and judge. `state_file` is a sidecar that stands for the checkpoint's own
    FP8 state. Raises as make_plan does, and as sidecar.read."""
    states = sidecar.read(state_file) if state_file else reader.fp8
    plan, jobs = plan_gemms(reader)
    with progress(stored_bytes(reader, jobs)) as on_bytes:
        weights = measure_weights(reader, plan, jobs, states, workers=workers, on_bytes=on_bytes)
    return judge(list(dict.fromkeys(job.module for job in jobs)), weights, states)
