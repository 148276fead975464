"""A plan for people: what a conversion will do, one line for parameters whose names differ only in numbers."""

from collections.abc import Sequence
from itertools import islice

from precisionctl.checkpoints.megatron.keys import expert_of, layer_of
from precisionctl.conversion.estimate import Estimate
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.param import ONE_RANK, STATE
from precisionctl.planning.checks import without_numbers
from precisionctl.planning.plan import Job, Plan
from precisionctl.reports.table import Table
from precisionctl.sizes import counted, size

_LINES = 200
"""Most kinds that are shown: a stranger's names may all differ."""


def tables(plan: Plan, expected: Estimate, ranks: int = 1) -> list[Table]:
    """The plan's rows, and what it will take by so many ranks; `Plan.describe` has every job and every tensor."""
    by_kind: dict[str, list[Job]] = {}
    for job in plan.jobs:
        by_kind.setdefault(without_numbers(job.row.megatron), []).append(job)
    rows = []
    for kind, jobs in islice(by_kind.items(), _LINES):
        written = [plan.targets[name] for job in jobs for name in job.writes]
        dtypes = dict.fromkeys(spec.dtype.value for spec in written)
        nbytes = size(sum(spec.nbytes for spec in written))
        first = jobs[0]
        counts = (str(len(jobs)), str(len(first.reads)), str(len(first.writes)))
        rows.append((kind, *counts, ", ".join(dtypes), nbytes))
    if len(by_kind) > _LINES:
        rows.append((f"... and {len(by_kind) - _LINES} more", "-", "-", "-", "-", "-"))
    title = f"{plan.model.model_type}, {plan.from_layout} to {plan.to_layout}: "
    title += f"{counted(len(plan.jobs), 'job')}, {size(plan.nbytes)}"
    seconds = expected.seconds
    time = "not measured" if seconds is None else f"{seconds:.1f} s, by a short probe of this disk"
    if seconds is not None and ranks > 1:
        time += f", if {ranks} ranks do not slow each other down"
    cost = [
        ("tensors", f"{len(plan.targets)}"),
        ("to write", size(plan.nbytes)),
        (f"memory {'of each rank ' if ranks > 1 else ''}beside the program", size(expected.memory)),
        ("time", time),
    ]
    named = "parameter" if isinstance(plan.model, UntabledModel) else "Megatron parameter"
    return [
        Table(title, (named, "count", "reads", "writes", "dtype", "bytes"), rows),
        *([_stages(plan)] if plan.parallelism != ONE_RANK else []),
        Table("", ("", ""), cost),
    ]


def _stages(plan: Plan) -> Table:
    """How the weights are cut: for each pipeline rank its layers, and what each of its GPUs holds of them."""
    sizes, last = plan.parallelism, plan.parallelism.pipeline - 1
    layers: list[list[int]] = [[] for _ in range(sizes.pipeline)]
    for number, count in enumerate(sizes.layers_of_stages(plan.model.num_layers)):
        first = sum(map(len, layers))
        layers[number % sizes.pipeline] += range(first, first + count)
    rank_of = {layer: rank for rank, theirs in enumerate(layers) for layer in theirs}
    held = [0] * sizes.pipeline
    for name, spec in plan.text.targets.items():
        if name.startswith(STATE):
            continue
        of_expert = expert_of(name) is not None
        cut = 1 if spec.parallel.kind == "replicated" else sizes.tensor_of(experts=of_expert)
        share = spec.nbytes // cut // (sizes.expert if of_expert else 1)
        if layer := layer_of(name):
            held[rank_of[layer[0]]] += share
        elif "embedding." not in name:
            held[last] += share
        else:
            held[0] += share
            held[last] += share if plan.model.tied_embeddings and last else 0  # the output layer's copy
    rows = [(str(rank), _ranges(layers[rank]), size(held[rank])) for rank in range(sizes.pipeline)]
    by_expert = f", {sizes.expert} of experts" if sizes.expert > 1 else ""
    title = f"Split for {sizes.pipeline} pipeline x {sizes.tensor} tensor-parallel ranks{by_expert}"
    return Table(title, ("pipeline rank", "layers", "weights on each GPU"), rows)


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 8-11`."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return ", ".join(f"{start}-{end}" if start < end else f"{start}" for start, end in zip(starts, ends, strict=True))
