"""A plan for people: what a conversion will do, one line for each kind of parameter."""

from precisionctl.architectures.wrappers import TOWERS
from precisionctl.conversion.estimate import Estimate
from precisionctl.planning.plan import Job, Plan
from precisionctl.reports.table import Table, size


def tables(plan: Plan, expected: Estimate) -> list[Table]:
    """The plan's rows, and what it will take; `Plan.describe` has every job and every tensor."""
    by_kind: dict[str, list[Job]] = {}
    for job in plan.jobs:
        kind = f"{TOWERS}*" if plan.model.wrapper and job.name.startswith(TOWERS) else job.row.megatron
        by_kind.setdefault(kind, []).append(job)
    rows = []
    for kind, jobs in by_kind.items():
        written = [plan.targets[name] for job in jobs for name in job.writes]
        dtypes = dict.fromkeys(str(spec.dtype).removeprefix("torch.") for spec in written)
        nbytes = size(sum(spec.nbytes for spec in written))
        first = jobs[0]
        counts = (str(len(jobs)), str(len(first.reads)), str(len(first.writes)))
        rows.append((kind, *counts, ", ".join(dtypes), nbytes))
    title = f"{plan.model.model_type}, {plan.source} to {plan.target}: {len(plan.jobs)} jobs, {size(plan.nbytes)}"
    time = "" if expected.seconds is None else f"{expected.seconds:.1f} s, by a short probe of this disk"
    cost = [
        ("tensors", f"{len(plan.targets)}"),
        ("to write", size(plan.nbytes)),
        ("memory beside the program", size(expected.memory)),
        ("time", time),
    ]
    return [
        Table(title, ("Megatron parameter", "count", "reads", "writes", "dtype", "bytes"), rows),
        Table("", ("", ""), cost),
    ]
