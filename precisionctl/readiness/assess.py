"""Assess a checkpoint: measure its weights, and judge them and what FP8 state has recorded of other roles."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from precisionctl.checkpoints.base import Reader
from precisionctl.conversion.known_state import known_state, outdated_note
from precisionctl.model_shape import UntabledModel
from precisionctl.readiness.four_bits import cost_of_four_bits
from precisionctl.readiness.judge import Readiness, judge
from precisionctl.readiness.weights import measure_weights, plan_gemms, stored_bytes

BytesProgress = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Opens a progress bar for a number of bytes, and yields a function to call with the number of further bytes done."""


def assess(reader: Reader, state_file: Path | None, progress: BytesProgress, workers: int = 1) -> Readiness:
    """Measure the weights of all FP8 GEMMs, and judge them with the FP8 state, which is taken from `state_file` first.
    Raises as `make_plan` and `known_state`."""
    plan, jobs = plan_gemms(reader)
    known = known_state(reader, plan.gemms, state_file)
    with progress(stored_bytes(reader, jobs)) as on_bytes:
        weights = measure_weights(reader, plan, jobs, known.current, workers=workers, on_bytes=on_bytes)
    outdated = known.current is None or known.current.of_weights != known.of_weights
    statistics = {module: [one.statistics for one in measured] for module, measured in weights.items()}
    judged = judge(list(plan.gemms), statistics, known.current or known.outdated, outdated=outdated)
    notes = list(known.notes)
    if known.outdated:
        notes.append(outdated_note(known.outdated, "nothing uses it"))
    elif known.current is None:
        notes.append("There is no FP8 state: delayed scaling has nothing to start from but the weights.")
    four_bits = cost_of_four_bits({module: [one.four_bits for one in measured] for module, measured in weights.items()})
    can_calibrate = not isinstance(reader.model, UntabledModel)
    return replace(judged, four_bits=four_bits, notes=tuple(notes), can_calibrate=can_calibrate)
