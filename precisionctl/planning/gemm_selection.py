"""Choose by name patterns which weights of a plan become FP8, where the user asks for other ones than the family's
table."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from precisionctl.architectures.read_off import may_be_asked_for, why_not_gemms
from precisionctl.engines.serving import precision_group
from precisionctl.errors import RecipeError
from precisionctl.planning.plan import Plan


def choose(plan: Plan, include: Sequence[str], exclude: Sequence[str]) -> Plan:
    """The plan, in Hugging Face's layout, with other weights as those of FP8 GEMMs.

    A pattern is a shell pattern and must match a module's whole name in the directory (a weight's name without
    `.weight`). Weights that engines want in the same form follow each other. `exclude` wins over `include`. Raises
    RecipeError for a pattern that matches nothing.
    """
    gemms = {name for job in plan.jobs if job.row.may_be_codes for name in job.weights}
    reasons = why_not_gemms(plan.targets)
    linears = [name for name in plan.targets if name in gemms or may_be_asked_for(reasons.get(name, ""))]
    wanted, unwanted = (_groups(linears, patterns, reasons) for patterns in (include, exclude))
    chosen = (gemms | {name for name in linears if precision_group(name) in wanted}) - {
        name for name in linears if precision_group(name) in unwanted
    }
    jobs = []
    for job in plan.jobs:
        gemm = not chosen.isdisjoint(job.writes)
        left = [template for template, name in zip(job.row.hf, job.writes, strict=False) if name not in chosen]
        if job.row.only_exported:
            row = replace(job.row, only_exported=gemm)
        else:
            row = replace(job.row, gemm=gemm, values=tuple(left) if gemm else ())
        jobs.append(replace(job, row=row))
    return replace(plan, jobs=tuple(jobs))


def included_groups(plan: Plan, include: Sequence[str]) -> set[str]:
    """The groups of a chosen plan's FP8 weights that the patterns name, whatever a recipe keeps in BF16."""
    names = [name for job in plan.jobs for name in job.weights]
    return {precision_group(name) for name in names if any(_matches(name, pattern) for pattern in include)}


def _matches(weight: str, pattern: str) -> bool:
    return fnmatchcase(weight.removesuffix(".weight"), pattern)


def _whole_names(linears: Sequence[str], pattern: str) -> str:
    """The advice for a pattern that matches nothing: one that does, of which it is a part, perhaps with `.weight`."""
    bare = pattern.removesuffix(".weight")
    others = (bare, f"*.{bare}", f"{bare}.*", f"*.{bare}.*")
    if meant := next((each for each in others if any(_matches(name, each) for name in linears)), None):
        return f"Patterns match whole names of modules. Did you mean '{meant}'?"
    example = f", such as `{linears[0].removesuffix('.weight')}`" if linears else ""
    return f"Patterns match whole names of modules in the result{example}."


def _groups(linears: Sequence[str], patterns: Sequence[str], reasons: Mapping[str, str]) -> set[str]:
    """The groups of the weights that match the patterns. `reasons` says of other tensors why they can be no FP8 GEMM's
    weight."""
    found = set()
    for pattern in patterns:
        groups = {precision_group(name) for name in linears if _matches(name, pattern)}
        if not groups:
            for name, why in reasons.items():
                if _matches(name, pattern):
                    raise RecipeError(
                        f"{pattern!r} names `{name}`, which never becomes codes: it is {why}",
                        do="Leave the pattern out: engines read such tensors as values.",
                    )
            raise RecipeError(f"no weight of a linear is called {pattern!r}", do=_whole_names(linears, pattern))
        found |= groups
    return found
