"""The picture of loss curves: as a PNG for a README, as an SVG that a page colours for light and dark."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from precisionctl.errors import EnvironmentProblem, printable
from precisionctl.reports.curves import Curve

try:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
except ImportError as error:
    raise EnvironmentProblem(
        f"a picture of curves needs matplotlib, which is not installed: {error}",
        do="pip install 'precisionctl[plots]'",
    ) from None

COLOURS = ("#7c8798", "#2f6fdb", "#d9622b", "#2a9d6f", "#9b4dca", "#b8860b")
"""Told apart on white and on black, and by the colour-blind; repeated after the sixth run."""


SMOOTH_FROM = 200
"""Curves of more steps are drawn faintly, and over them their mean over the last steps: a hundredth of all."""


def smoothed(values: Mapping[int, float]) -> dict[int, float]:
    """At some 2,000 of the steps, or all of fewer, the mean of the last hundredth of the curve's steps; fewer where it
    begins."""
    span, steps, numbers = -(-len(values) // 100), list(values), list(values.values())
    some = range(0, len(steps), max(1, len(steps) // 2000))
    return {steps[at]: fmean(numbers[max(0, at - span + 1) : at + 1]) for at in some}


def draw(curves: Sequence[Curve]) -> Figure:
    """Losses above; below them the gap of each run to the first, in percent."""
    figure = Figure(figsize=(9, 6.2), layout="constrained")
    losses, gaps = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for number, curve in enumerate(curves):
        style = {"color": COLOURS[number % len(COLOURS)], "linewidth": 1.4, "label": f"run {number}"}
        if any(curve.losses == other.losses for other in curves[:number]):
            style |= {"linestyle": (0, (4, 4))}  # so that the one below it is seen too
        in_percent = {step: 100 * gap for step, gap in curve.against(curves[0]).items()}
        for axes, values in ((losses, curve.losses), (gaps, in_percent)):
            if len(values) > SMOOTH_FROM:
                axes.plot(list(values), list(values.values()), **style | {"alpha": 0.25, "label": "_"})
                values = smoothed(values)
            axes.plot(list(values), list(values.values()), **style)
    for text, curve in zip(losses.legend(frameon=False).get_texts(), curves, strict=True):
        text.set(parse_math=False, text=printable(curve.name))  # a folder's name: no formula, nor hidden for its `_`
    losses.set_ylabel("training loss")
    gaps.set_ylabel(f"gap to {printable(curves[0].name)}, %", parse_math=False)
    gaps.set_xlabel("step")
    for each in (losses, gaps):
        each.spines[["top", "right"]].set_visible(False)
        each.grid(True, linewidth=0.5, alpha=0.4)
    return figure


def write_png(curves: Sequence[Curve], path: Path) -> None:
    """Draw curves into a PNG file."""
    draw(curves).savefig(path, format="png", dpi=150)


def svg(curves: Sequence[Curve]) -> str:
    """An `<svg>` element to stand in a page: text stays text, and takes the page's font and colour."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "precisionctl"}):
        figure = draw(curves)
        figure.patch.set_visible(False)
        for axes in figure.axes:
            axes.patch.set_visible(False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    drawing = text.getvalue()
    return drawing[drawing.index("<svg") :]
