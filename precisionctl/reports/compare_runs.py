"""Runs against the first of them: the gap of their losses now, its mean over the last steps, its worst."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from precisionctl.errors import DataError
from precisionctl.reports.curves import Curve, read_curves, read_shadows
from precisionctl.reports.table import Table, percent
from precisionctl.sizes import counted
from precisionctl.trainer.measure.metrics import relative_gap
from precisionctl.trainer.saved.run_folder import differing_settings, settings_of

LAST_STEPS = 100
"""How many of the last common steps the mean gap is taken over, if nobody says otherwise."""

_MOST_PLACES = 17
"""Decimal places of a percent that tell any gap of losses from a limit, but for the last bits of a number."""


@dataclass(frozen=True)
class Gap:
    """How far a run is from the first one over the steps that both have, as (loss - first) / first.

    `mean` compares the mean losses of the last `averaged` common steps; `worst` is the largest gap of a single step,
    above or below.
    """

    run: str
    steps: int
    averaged: int
    loss: float
    now: float
    mean: float
    worst: float
    worst_step: int


@dataclass(frozen=True)
class ShadowSummary:
    """All shadows of a run: FP8 or NVFP4 against BF16 from the same weights. `looks` is their number."""

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
    """The curves of all runs, the gaps of all but the first, and the shadows of those with a guard. `settings` are what
    not all runs were started with alike, by name, with each run's own; a run that does not say has none."""

    curves: Sequence[Curve]
    gaps: Sequence[Gap]
    shadows: Sequence[ShadowSummary] = ()
    settings: Mapping[str, Sequence[object]] = field(default_factory=dict)
    last: int = LAST_STEPS
    """The number of steps that mean gaps are wanted over."""

    def beyond(self, limit: float) -> list[Gap]:
        """The runs whose mean gap is larger than `limit`, either way, or not a number. Raises DataError for one with
        fewer common steps than are to be averaged."""
        for gap in self.gaps:
            if gap.averaged < self.last:
                raise DataError(
                    f"{gap.run} has {counted(gap.steps, 'step')} in common with {self.curves[0].name}, and "
                    f"a gate takes the mean of {self.last}",
                    do=f"Train for longer, or judge fewer steps: --last {gap.steps}.",
                )
        return [gap for gap in self.gaps if not abs(gap.mean) <= limit]

    def verdict(self, limit: float) -> str:
        """Whether all runs are within a gate, in words."""
        beyond = self.beyond(limit)
        places = _places(limit, [gap.mean for gap in beyond])
        gaps = ", ".join(f"{gap.run} {percent(gap.mean, places)}" for gap in beyond or self.gaps)
        how = f"{'Further than' if beyond else 'Within'} {percent(limit, places).removeprefix('+')}"
        return f"{how} of {self.curves[0].name} over the last {counted(self.last, 'step')}: {gaps}."

    def as_json(self, limit: float | None = None) -> dict[str, Any]:
        """Gaps as ratios, not percents. `within` is the verdict of a gate at `limit`; both are null without one."""
        runs = [asdict(gap) for gap in self.gaps]
        return {
            "against": self.curves[0].name,
            "mean_over_last": self.last,
            "limit": limit,
            "within": None if limit is None else not self.beyond(limit),
            "runs": runs,
            "shadows": [asdict(each) for each in self.shadows],
            "settings": {name: [*values] for name, values in self.settings.items()},
        }

    def tables(self) -> list[Table]:
        more = [*([self.shadow_table()] if self.shadows else []), *([self.differences()] if self.settings else [])]
        return [self.table(), *more]

    def differences(self) -> Table:
        rows = [(name, *(_in_words(name, values))) for name, values in self.settings.items()]
        return Table("Settings that differ", ("", *(curve.name for curve in self.curves)), rows)

    def shadow_table(self) -> Table:
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
            for each in self.shadows
        ]
        gaps = ("gap now", "mean gap", "worst gap", "at step")
        columns = ("run", "looks", *gaps, "gradients' cosine", "norm ratio", "warnings")
        return Table("FP8 or NVFP4 against BF16 from the same weights", columns, rows)

    def table(self) -> Table:
        rows = [
            (
                gap.run,
                str(gap.steps),
                f"{gap.loss:.4f}",
                percent(gap.now),
                percent(gap.mean),
                str(gap.averaged),
                percent(gap.worst),
                str(gap.worst_step),
            )
            for gap in self.gaps
        ]
        columns = ("run", "steps in common", "loss now", "gap now", "mean gap", "of last", "worst gap", "at step")
        return Table(f"Training loss against {self.curves[0].name}", columns, rows)


def _places(limit: float, beyond: Sequence[float]) -> int:
    """The decimal places of a percent, two at least, that show a limit as it is and each gap `beyond` it as larger."""

    def is_enough(places: int) -> bool:
        shown, *gaps = (round(100 * abs(ratio), places) for ratio in (limit, *beyond))
        return math.isclose(shown, 100 * limit) and all(gap != shown for gap in gaps)

    return next(filter(is_enough, range(2, _MOST_PLACES)), _MOST_PLACES)


def compare(paths: Sequence[Path], last: int) -> RunComparison:
    """Read the runs at `paths` and set them against the first; mean gaps are over the `last` common steps. Raises
    DataError for a run without metrics."""
    curves = read_curves(paths)
    shadows = [found for path, curve in zip(paths, curves, strict=True) if (found := find_shadows(path, curve.name))]
    gaps = [find_gap(curve, curves[0], last) for curve in curves[1:]]
    runs = [settings_of(path if path.is_dir() else path.parent) for path in paths]
    known = [run for run in runs if run]
    names = {name for run in known for name in differing_settings(known[0], run)}
    settings = {name: [run.get(name) for run in runs] for name in sorted(names)}
    return RunComparison(curves, gaps, shadows, settings, last)


def _in_words(name: str, values: Sequence[object]) -> list[str]:
    """Values of a setting as cells; digests as letters, of which the same ones mean the same."""
    if name in ("source", "data"):
        known = dict.fromkeys(str(value) for value in values if value is not None)
        letters = {value: f"{chr(ord('A') + number % 26)}{number // 26 or ''}" for number, value in enumerate(known)}
        return ["-" if value is None else letters[str(value)] for value in values]
    return ["-" if value is None else str(value) for value in values]


def find_shadows(path: Path, name: str) -> ShadowSummary | None:
    """None for a run without a guard."""
    rows = read_shadows(path)
    if not rows:
        return None
    worst = max(rows, key=lambda row: (math.isnan(row["gap"]), abs(row["gap"])))
    return ShadowSummary(
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


def find_gap(curve: Curve, first: Curve, averaged: int) -> Gap:
    """Raises DataError where the two runs have no step in common."""
    by_step = curve.against(first)
    if not by_step:
        raise DataError(f"{curve.name} has no step in common with {first.name}", do="Compare runs over the same steps.")
    steps = list(by_step)
    last = steps[-averaged:]
    worst_step = max(steps, key=lambda step: (math.isnan(by_step[step]), abs(by_step[step])))
    return Gap(
        run=curve.name,
        steps=len(steps),
        averaged=len(last),
        loss=curve.losses[steps[-1]],
        now=by_step[steps[-1]],
        mean=relative_gap(fmean(curve.losses[step] for step in last), fmean(first.losses[step] for step in last)),
        worst=by_step[worst_step],
        worst_step=worst_step,
    )


def draw(comparison: RunComparison, *, png: Path | None, html: Path | None, verdict: str = "") -> None:
    """The curves as a picture, and as a page with the tables, under the words of a gate's verdict."""
    from precisionctl.reports import plot  # matplotlib takes a second to import, and a gate needs no picture
    from precisionctl.reports.page import html_table, page, paragraph

    if png:
        plot.write_png(comparison.curves, png)
    if html:
        first = [paragraph(verdict)] if verdict else []
        parts = [*first, *map(html_table, comparison.tables()), plot.svg(comparison.curves)]
        html.write_text(page("Loss curves", parts), encoding="utf-8")
