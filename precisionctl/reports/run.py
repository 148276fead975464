"""The lines that a run prints before its first step, at skipped or suspicious steps, and after its last."""

from collections.abc import Mapping
from signal import Signals
from typing import Any

from precisionctl.checkpoints.megatron.towers import tower_names
from precisionctl.codes.statistics import scaling_words
from precisionctl.fp8.state import Role
from precisionctl.reports.table import percent
from precisionctl.sizes import counted, size
from precisionctl.trainer.fp8_start import StateOrigin
from precisionctl.trainer.measure.metrics import StepMetrics
from precisionctl.trainer.preflight import DiskSpace, would_fit
from precisionctl.trainer.resume import Finished, Started
from precisionctl.trainer.run_plan import DryRun, RunPlan


def beginning(started: Started) -> list[str]:
    """The run's precision, steps and backend, the origin of each role's FP8 state, disk space and notes."""
    plan = started.plan
    lines = [
        f"{precision(plan)} in {plan.out}: from step {started.step} to {plan.recipe.train.steps}, "
        f"{_taken(started)}, {computed(plan)}"
    ]
    if started.fp8:
        lines.append(f"FP8 state of modules: {fp8_sources(started.fp8)}")
    return [*lines, *_disk(started.disk), *started.notes]


def dry_run(dry: DryRun) -> list[str]:
    """What a run would do, and the memory and disk that it needs."""
    plan, ahead, train = dry.plan, dry.ahead, dry.plan.recipe.train
    parameters, towers = _parameters(plan)
    beside = f"; {towers:,} more, of its towers, are kept beside it as they are" if towers else ""
    several = f", {ahead.ranks} ranks" if ahead.ranks > 1 else ""
    memory = {key: size(value) for key, value in vars(ahead.memory).items()}
    rows = f"{counted(train.batch_size, 'row')} of {plan.recipe.data.sequence_length}, "
    rows += f"{train.micro_batch_size} in a pass"
    lines = [
        f"{precision(plan)} in {plan.out}: from step {dry.step} to {train.steps}, {_taken(dry)}, "
        f"{computed(plan)}{several}",
        f"Model: {parameters:,} parameters{beside}",
        f"An update: {rows}; {ahead.tokens:,} tokens, {ahead.flops / 1e12:,.4g} TFLOP",
        f"Memory of each rank: about {size(ahead.memory.total)}, and {size(ahead.free)} are free",
        f"  {', '.join(f'{key} {value}' for key, value in memory.items())}",
    ]
    if not ahead.fits:
        lines.append(f"It does not fit. {would_fit(ahead)}")
    return [*lines, *_disk(dry.disk), *plan.notes(dry.step), "Nothing was started."]


def dry_run_json(dry: DryRun) -> dict[str, Any]:
    """What `--dry-run --json` prints: the same in numbers (docs/json.md)."""
    plan, ahead = dry.plan, dry.ahead
    parameters, _ = _parameters(plan)
    memory = {"parts": vars(ahead.memory), "total": ahead.memory.total, "free": ahead.free, "fits": ahead.fits}
    return {
        **_chosen(plan),
        **_from(dry),
        "parameters": parameters,
        "ranks": ahead.ranks,
        "tokens": ahead.tokens,
        "flops": ahead.flops,
        "memory": memory | {"alternatives": ahead.alternatives},
        "notes": [*plan.notes(dry.step)],
    }


def result_json(started: Started, finished: Finished, last: StepMetrics | None) -> dict[str, Any]:
    """What `resume --json` prints at the end (docs/json.md); `last` is the last step that this command made, None if it
    made none."""
    return {
        **_chosen(started.plan),
        **_from(started),
        "fp8": started.fp8,
        "last_step": finished.step,
        "loss": last.loss if last else None,
        "held_out_loss": last.held_out_loss if last else None,
        "checkpoint": str(finished.checkpoint),
        "stopped": _stopped(finished),
        "kept": True if finished.stopped else None,
        "notes": [*started.notes],
    }


def _chosen(plan: RunPlan) -> dict[str, Any]:
    """What a run is, as JSON."""
    return {
        "out": str(plan.out),
        "precision": precision(plan),
        "backend": plan.backend,
        "steps": plan.recipe.train.steps,
        "load": plan.load,
        "skipped": sorted(plan.skipped),
    }


def _from(run: Started | DryRun) -> dict[str, Any]:
    """Where a run begins, and with which room on the disk, as JSON."""
    disk = vars(run.disk) | {"fits": run.disk.holds_all}
    return {"step": run.step, "continues": run.continues, "disk": disk}


def _stopped(finished: Finished) -> str | None:
    """What stopped a run, in a word: `SIGTERM`, or `time limit`."""
    return finished.stopped.name if isinstance(finished.stopped, Signals) else finished.stopped


def _parameters(plan: RunPlan) -> tuple[int, int]:
    """The numbers of parameters of a run's model, and of its towers."""
    sizes = {name: spec.rows * spec.columns for name, spec in plan.source.specs.items()}
    towers = sum(sizes.pop(name) for name in tower_names(plan.source).values())
    return sum(sizes.values()), towers


def _taken(run: Started | DryRun) -> str:
    """What a run begins with."""
    if run.continues:
        return "continued"
    return "weights only" if "optimizer" in run.plan.skipped else "weights and optimizer"


def _disk(space: DiskSpace) -> list[str]:
    """The disk space that a run's checkpoints need; nothing for a run that writes none."""
    if not space.more:
        return []
    lines = [f"Disk: a checkpoint takes {size(space.each)}, and {size(space.free)} are free"]
    if space.each > space.free:
        lines.append("It does not fit. Make room, or choose another --out.")
    elif not space.holds_all:
        these = f"{space.more} more at a time (train.keep and the one that is written)"
        lines.append(f"  {these} {'does' if space.more == 1 else 'do'} not fit: make room")
    return lines


def precision(plan: RunPlan) -> str:
    """A run's precision as the title of a panel: `FP8, delayed scaling` or `BF16`."""
    chosen = plan.recipe.precision
    return scaling_words(chosen.scaling, ",") if chosen.fp8 else "BF16"


def computed(plan: RunPlan) -> str:
    """What computes a run's GEMMs."""
    if plan.backend == "te":
        return "computed by Transformer Engine"
    precision = plan.recipe.precision
    return f"{precision.codes} emulated in PyTorch" if precision.fp8 else "computed by PyTorch"


def fp8_sources(counts: Mapping[StateOrigin, Mapping[Role, int]]) -> str:
    """The number of modules by origin and role: `carried: input 8, weight 8; warm-up: grad_output 8`."""
    return "; ".join(
        f"{source}: {', '.join(f'{role} {count}' for role, count in roles.items())}" for source, roles in counts.items()
    )


def warnings(step: StepMetrics) -> list[str]:
    """Warnings of a step: that it was skipped, and that the guard found it too far from BF16."""
    lines = []
    if step.skipped:
        running = f", {step.skipped} running" if step.skipped > 1 else ""
        lines.append(
            f"Step {step.step} is skipped{running}: its loss is {step.loss}, its gradients' norm {step.grad_norm}"
        )
    shadow = step.shadow
    if shadow and shadow.decision != "ok":
        gaps = f"its loss {shadow.loss:.4f} is {percent(shadow.gap)} from BF16's"
        if shadow.held_out_gap is not None:
            gaps += f", {percent(shadow.held_out_gap)} on held-out data"
        lowest = min(shadow.modules, key=lambda name: shadow.modules[name].cosine)
        then = {"warn": "", "stop": "; the run stops", "bf16": "; the next steps are in BF16"}[shadow.decision]
        lines.append(
            f"Guard, step {shadow.step}: {gaps}; gradients' cosine {shadow.gradients.cosine:.4f}, "
            f"lowest {shadow.modules[lowest].cosine:.4f} in {lowest}{then}"
        )
    return lines


def ending(finished: Finished) -> list[str]:
    """The checkpoint that the run ended with, and how to continue a run that was stopped."""
    if finished.stopped is None:
        return [f"Done: {finished.checkpoint}"]
    why = "the time limit" if finished.stopped == "time limit" else _stopped(finished)
    return [
        f"Stopped by {why} at step {finished.step}; {finished.checkpoint} holds it.",
        "The same command continues from there.",
    ]
