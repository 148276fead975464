"""A plan for people: what a conversion will do, one line for each kind of parameter."""

from itertools import groupby

from precisionctl.conversion.estimate import Estimate
from precisionctl.planning.plan import Job, Plan
from precisionctl.reports.table import Table, size


def tables(plan: Plan, expected: Estimate) -> list[Table]:
    """The plan's rows, and what it will take; `Plan.describe` has every job and every tensor."""
    rows = [_row(list(jobs), plan) for _, jobs in groupby(_by_row(plan), key=_kind)]
    title = f"{plan.model.architecture}, {plan.source} to {plan.target}: {len(plan.jobs)} jobs, {size(plan.nbytes)}"
    return [
        Table(title, ("Megatron parameter", "count", "reads", "writes", "dtype", "bytes"), rows),
        _cost(plan, expected),
    ]


def _cost(plan: Plan, expected: Estimate) -> Table:
    time = "" if expected.seconds is None else f"{expected.seconds:.1f} s, by a short probe of this disk"
    rows = [
        ("tensors", f"{len(plan.targets)}"),
        ("to write", size(plan.nbytes)),
        ("memory beside the program", size(expected.memory)),
        ("time", time),
    ]
    return Table("", ("", ""), rows)


def _by_row(plan: Plan) -> list[Job]:
    order = {kind: number for number, kind in enumerate(dict.fromkeys(_kind(job) for job in plan.jobs))}
    return sorted(plan.jobs, key=lambda job: order[_kind(job)])


def _kind(job: Job) -> str:
    return job.row.megatron


def _row(jobs: list[Job], plan: Plan) -> tuple[str, ...]:
    written = [plan.targets[name] for job in jobs for name in job.writes]
    dtypes = dict.fromkeys(str(spec.dtype).removeprefix("torch.") for spec in written)
    nbytes = size(sum(spec.nbytes for spec in written))
    first = jobs[0]
    return (_kind(first), str(len(jobs)), str(len(first.reads)), str(len(first.writes)), ", ".join(dtypes), nbytes)
