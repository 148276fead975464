"""Assess a checkpoint: measure its weights, and judge them and what FP8 state has recorded of other roles."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.chunks import BytesProgress, in_pieces, read_values
from precisionctl.codes.statistics import Statistics
from precisionctl.commands.run_precision import precision_if_known, precision_of_export
from precisionctl.conversion.known_state import known_state, outdated_note, why_outdated
from precisionctl.errors import BROKEN_WEIGHTS
from precisionctl.fp8.state import Fp8States
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.planning.make_plan import plan_weights
from precisionctl.readiness.four_bits import cost_of_four_bits
from precisionctl.readiness.judge import Readiness, judge
from precisionctl.readiness.weights import measure_weights, stored_bytes
from precisionctl.sizes import counted, listed


def assess(reader: Reader, state_file: Path | None, progress: BytesProgress, workers: int = 1) -> Readiness:
    """Measure the weights of all FP8 GEMMs, and judge them with the FP8 state, which is taken from `state_file` first.
    Raises as `make_plan` and `known_state`."""
    plan = plan_weights(reader)
    jobs = tuple(job for job in plan.jobs if job.row.gemm)
    known = known_state(reader, plan.gemms, state_file)
    with progress(stored_bytes(reader, jobs)) as on_bytes:
        weights = measure_weights(reader, plan, jobs, known.current, workers=workers, on_bytes=on_bytes)
    states = known.current or known.outdated
    outdated = why_outdated(states) if states and states.of_weights != known.weights_digest else None
    statistics = {module: [one.statistics for one in measured] for module, measured in weights.items()}
    predicting = dict.fromkeys(job.module for job in jobs if job.row.of_prediction)
    shapes = {job.module: plan.targets[job.writes[0]].shape for job in jobs}
    kept = _kept(reader, states, [module for module in shapes if module not in predicting])
    gemms = {module: shapes[module] for module in plan.gemms if module not in predicting and module not in kept}
    judged = judge(gemms, {module: statistics[module] for module in gemms}, states, outdated=outdated)

    # weights with NaN or infinity, by the names that they are stored under
    broken: list[str] = []
    for name in dict.fromkeys(name for job in jobs if _is_broken(statistics[job.module]) for name in job.reads):
        pieces = in_pieces(0, reader.specs[name].rows, reader.specs[name].columns, _AT_ONCE)
        if not all(bool(read_values(reader, reader.encodings, name, *piece).isfinite().all()) for piece in pieces):
            broken.append(name)

    notes: list[str] = []
    if broken:
        has = "has" if len(broken) == 1 else "have"
        notes.append(f"WARNING: {listed(broken, 3)} {has} NaN or infinity. {BROKEN_WEIGHTS}")
    notes += known.notes
    if predicting:
        layers = counted(len(predicting), "module of layers", "modules of layers")
        notes.append(f"{layers} of multi-token prediction, which nothing here computes: they are not judged.")
    if kept:
        modules = counted(len(kept), "module")
        notes.append(
            f"{modules} stayed in BF16 in the run, such as {kept[0]}, and recorded nothing: they are not judged."
        )
    if known.outdated:
        notes.append(outdated_note(known.outdated, "nothing uses it"))
    elif known.current is None:
        notes.append("There is no FP8 state: delayed scaling has nothing to start from but the weights.")

    sound = {module: measured for module, measured in weights.items() if not _is_broken(statistics[module])}
    four_bits = cost_of_four_bits({module: [one.four_bits for one in measured] for module, measured in sound.items()})
    can_calibrate = not isinstance(reader.model, UntabledModel)
    verdicts = {scaling: replace(verdict, stayed=len(kept)) for scaling, verdict in judged.verdicts.items()}
    return replace(judged, verdicts=verdicts, four_bits=four_bits, notes=tuple(notes), can_calibrate=can_calibrate)


def _kept(reader: Reader, states: Fp8States | None, modules: Sequence[str]) -> list[str]:
    """The modules that stayed in BF16 in the run that recorded `states`, and of which these have nothing."""
    run, _ = precision_if_known(reader)
    if states is None or run is None:
        return []
    precision, _ = precision_of_export(None, run.precision, reader.model)
    recorded = {name for name, state in states.modules.items() if any(part.recorded for part in state.roles.values())}
    measured = recorded | states.statistics.keys()
    return [module for module in modules if not precision.in_fp8(module) and module not in measured]


def _is_broken(measured: Sequence[Statistics]) -> bool:
    """Whether any element of a module's weights is NaN or infinite."""
    return any(one.nonfinite for one in measured)


_AT_ONCE = 1 << 20
"""Elements that are read at a time."""
