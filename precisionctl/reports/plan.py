"""A plan for people: what a conversion will do, one line for parameters whose names differ only in numbers."""

from itertools import islice

from precisionctl.conversion.estimate import Estimate
from precisionctl.model_shape import UntabledModel
from precisionctl.planning.checks import without_numbers
from precisionctl.planning.plan import Job, Plan
from precisionctl.reports.table import Table, size

_LINES = 200
"""Most kinds that are shown: a stranger's names may all differ."""


def tables(plan: Plan, expected: Estimate) -> list[Table]:
    """The plan's rows, and what it will take; `Plan.describe` has every job and every tensor."""
    by_kind: dict[str, list[Job]] = {}
    for job in plan.jobs:
        by_kind.setdefault(without_numbers(job.row.megatron), []).append(job)
    rows = []
    for kind, jobs in islice(by_kind.items(), _LINES):
        written = [plan.targets[name] for job in jobs for name in job.writes]
        dtypes = dict.fromkeys(str(spec.dtype).removeprefix("torch.") for spec in written)
        nbytes = size(sum(spec.nbytes for spec in written))
        first = jobs[0]
        counts = (str(len(jobs)), str(len(first.reads)), str(len(first.writes)))
        rows.append((kind, *counts, ", ".join(dtypes), nbytes))
    if len(by_kind) > _LINES:
        rows.append((f"... and {len(by_kind) - _LINES} more", "-", "-", "-", "-", "-"))
    title = f"{plan.model.model_type}, {plan.source} to {plan.target}: {len(plan.jobs)} jobs, {size(plan.nbytes)}"
    time = "" if expected.seconds is None else f"{expected.seconds:.1f} s, by a short probe of this disk"
    cost = [
        ("tensors", f"{len(plan.targets)}"),
        ("to write", size(plan.nbytes)),
        ("memory beside the program", size(expected.memory)),
        ("time", time),
    ]
    named = "parameter" if isinstance(plan.model, UntabledModel) else "Megatron parameter"
    return [
        Table(title, (named, "count", "reads", "writes", "dtype", "bytes"), rows),
        Table("", ("", ""), cost),
    ]
