"""Weights of shapes that an engine refuses in FP8, and what has to stay in BF16 with them."""

from collections.abc import Callable, Mapping, Sequence

from precisionctl.engines.serving import ServingLayout, in_step
from precisionctl.errors import PrecisionError
from precisionctl.param import TensorSpec
from precisionctl.planning.plan import Job, Plan
from precisionctl.quant_methods.base import Scheme

Refusal = Callable[[str, TensorSpec], str | None]
"""What an engine has against a weight of this name and shape as FP8; None for nothing."""


def served(plan: Plan, ranks: int = 1) -> ServingLayout:
    """A plan's model on so many GPUs."""
    return ServingLayout(plan.model.num_attention_heads, plan.model.num_query_groups, ranks)


def refused_shapes(jobs: Sequence[Job], plan: Plan, refusal: Refusal) -> dict[str, str]:
    """What the engine has against weights that these jobs write, by name."""
    found = {name: refusal(name, plan.targets[name]) for job in jobs for name in job.writes}
    return {name: what for name, what in found.items() if what}


def without_refused(jobs: Sequence[Job], refused: Mapping[str, str]) -> list[Job]:
    """The jobs that still can be FP8: none whose weight is refused, or which engines compute as one with such a one."""
    groups = {in_step(name) for name in refused}
    return [job for job in jobs if not any(in_step(name) in groups for name in job.writes)]


def refused_error(refused: Mapping[str, str], scheme: Scheme) -> PrecisionError:
    """The error for them, and what the user can choose."""
    name, what = next(iter(refused.items()))
    others = "--scheme static or dynamic, which have no blocks; or " if scheme == "block" else ""
    return PrecisionError(
        f"{len(refused)} weights have shapes that the engine refuses, the first is `{name}`: {what}",
        do=f"Choose {others}--keep-misfits, which leaves them in BF16 with what is computed with them; or name modules "
        "in keep_bf16 of a --recipe.",
    )
