"""A checkpoint, assessed: its weights measured, and what its FP8 state, or another file's, recorded of the rest."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from precisionctl.checkpoints.base import Reader
from precisionctl.fp8.carry import check_modules, read_state
from precisionctl.fp8.state import Fp8States
from precisionctl.readiness.judge import Readiness, judge
from precisionctl.readiness.weights import measure_weights, plan_gemms, stored_bytes

Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Given how many bytes there are, what hears of those that are done."""


def assess(reader: Reader, state_file: Path | None, progress: Progress, workers: int = 1) -> Readiness:
    """Measure every weight of an FP8 GEMM and judge. `state_file` is a sidecar that stands for the checkpoint's own
    FP8 state. Raises as make_plan does, and as read_state for a state of another model."""
    plan, jobs = plan_gemms(reader)
    states = read_state(state_file, plan.gemms) if state_file else reader.fp8
    if states:
        check_modules(states, plan.gemms)
    with progress(stored_bytes(reader, jobs)) as on_bytes:
        weights = measure_weights(reader, plan, jobs, states, workers=workers, on_bytes=on_bytes)
    judged = judge(list(plan.gemms), weights, states)
    return replace(judged, notes=tuple(_notes(reader.iteration, states)))


def _notes(iteration: int | None, states: Fp8States | None) -> Iterator[str]:
    if states is None:
        yield "There is no FP8 state: delayed scaling has nothing to start from but the weights."
    elif iteration is not None and states.iteration is not None:
        age, window = iteration - states.iteration, states.recipe.amax_history_len
        if age > window:
            yield f"The FP8 state is {age} steps old, and its history goes back {window}: nothing in it is recent."
