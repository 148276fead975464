"""Runs against the first of them: the gap of their losses now, its mean over the last steps, its worst."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from precisionctl.errors import DataError
from precisionctl.reports.curves import Curve, read_curves, read_shadows, relative
from precisionctl.reports.table import Table, percent

LAST_STEPS = 100
"""How many of the last steps the mean gap is taken over."""


@dataclass(frozen=True)
class Gap:
    """How far a run is from the first one over the steps that both have, as (loss - first) / first.

    `mean` compares the mean losses of the last `LAST_STEPS` common steps; `worst` is the largest gap of a
    single step, above or below.
    """

    run: str
    steps: int
    loss: float
    now: float
    mean: float
    worst: float
    worst_step: int


@dataclass(frozen=True)
class GuardLooks:
    """What the guard of a run has seen: FP8 against BF16 from the same weights, at each of its looks."""

    run: str
    looks: int
    now: float
    mean: float
    worst: float
    worst_step: int
    cosine: float
    norm_ratio: float
    warnings: int


@dataclass(frozen=True)
class RunComparison:
    """The curves of all runs, the gaps of all but the first, and what those with a guard have seen."""

    curves: Sequence[Curve]
    gaps: Sequence[Gap]
    looks: Sequence[GuardLooks] = ()

    def within(self, limit: float) -> bool:
        """False where a mean gap is larger than `limit`, either way, or not a number."""
        return all(abs(gap.mean) <= limit for gap in self.gaps)

    def as_json(self) -> dict[str, Any]:
        """Gaps as ratios, not percents."""
        runs = [asdict(gap) for gap in self.gaps]
        shadows = [asdict(look) for look in self.looks]
        return {"against": self.curves[0].name, "mean_over_last": LAST_STEPS, "runs": runs, "shadows": shadows}

    def tables(self) -> list[Table]:
        return [self.table(), *([self.shadows()] if self.looks else [])]

    def shadows(self) -> Table:
        rows = [
            (
                each.run,
                str(each.looks),
                *map(percent, (each.now, each.mean, each.worst)),
                str(each.worst_step),
                f"{each.cosine:.4f}",
                f"{each.norm_ratio:.4f}",
                str(each.warnings),
            )
            for each in self.looks
        ]
        gaps = ("gap now", "mean gap", "worst gap", "at step")
        columns = ("run", "looks", *gaps, "gradients' cosine", "norm ratio", "warnings")
        return Table("FP8 against BF16 from the same weights", columns, rows)

    def table(self) -> Table:
        rows = [
            (g.run, str(g.steps), f"{g.loss:.4f}", percent(g.now), percent(g.mean), percent(g.worst), str(g.worst_step))
            for g in self.gaps
        ]
        columns = ("run", "steps in common", "loss now", "gap now", f"gap, last {LAST_STEPS}", "worst gap", "at step")
        return Table(f"Training loss against {self.curves[0].name}", columns, rows)


def compare(paths: Sequence[Path]) -> RunComparison:
    """Read the runs at `paths` and set them against the first. Raises DataError for a run without metrics."""
    curves = read_curves(paths)
    looks = [look for path, curve in zip(paths, curves, strict=True) if (look := find_looks(path, curve.name))]
    return RunComparison(curves, [find_gap(curve, curves[0]) for curve in curves[1:]], looks)


def find_looks(path: Path, name: str) -> GuardLooks | None:
    """None for a run without a guard."""
    rows = read_shadows(path)
    if not rows:
        return None
    worst = max(rows, key=lambda row: (math.isnan(row["gap"]), abs(row["gap"])))
    return GuardLooks(
        run=name,
        looks=len(rows),
        now=rows[-1]["gap"],
        mean=fmean(row["gap"] for row in rows),
        worst=worst["gap"],
        worst_step=worst["step"],
        cosine=fmean(row["grad_cosine"] for row in rows),
        norm_ratio=fmean(row["grad_norm_ratio"] for row in rows),
        warnings=sum(row.get("decision") != "ok" for row in rows),
    )


def find_gap(curve: Curve, first: Curve) -> Gap:
    """Raises DataError where the two runs have no step in common."""
    by_step = curve.against(first)
    if not by_step:
        raise DataError(f"{curve.name} has no step in common with {first.name}", do="Compare runs over the same steps.")
    steps = list(by_step)
    last = steps[-LAST_STEPS:]
    worst_step = max(steps, key=lambda step: (math.isnan(by_step[step]), abs(by_step[step])))
    return Gap(
        run=curve.name,
        steps=len(steps),
        loss=curve.losses[steps[-1]],
        now=by_step[steps[-1]],
        mean=relative(fmean(curve.losses[step] for step in last), fmean(first.losses[step] for step in last)),
        worst=by_step[worst_step],
        worst_step=worst_step,
    )


def draw(comparison: RunComparison, *, png: Path | None, html: Path | None) -> None:
    """The curves as a picture, and as a page with the table."""
    from precisionctl.reports import plot  # matplotlib takes a second to import, and a gate needs no picture
    from precisionctl.reports.page import html_table, page

    if png:
        plot.write_png(comparison.curves, png)
    if html:
        parts = [*map(html_table, comparison.tables()), plot.svg(comparison.curves)]
        html.write_text(page("Loss curves", parts), encoding="utf-8")
