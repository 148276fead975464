"""The verdict on FP8 as a page: what to do, heat maps of every measure, everything that was found, and the limits."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from precisionctl.codes.statistics import FP8_SCALINGS, NAMES
from precisionctl.paths import own_name
from precisionctl.readiness.history import headroom
from precisionctl.readiness.judge import Readiness, RoleHealth
from precisionctl.readiness.patterns import split_name
from precisionctl.readiness.thresholds import ALL, GROWTH, KURTOSIS, SATURATION, UNDERFLOW
from precisionctl.reports import heat
from precisionctl.reports.heat import Cell, ColourScale, Column
from precisionctl.reports.inspect import Description, summary
from precisionctl.reports.page import commands, escaped, heading, html_table, page, paragraph
from precisionctl.reports.readiness import (
    REMEDIES,
    findings,
    four_bit_tables,
    keep_bf16,
    left_out_of_four_bits,
    rests_on,
    share_in_words,
    to_measure,
)
from precisionctl.reports.table import Table
from precisionctl.sizes import counted

_CARDS = """
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .8rem; margin: 1.2rem 0 }
.card { border: 1px solid var(--line); border-left: 5px solid var(--edge); border-radius: 6px; padding: .7rem .9rem }
.card b { display: block; font-size: 1rem } .card span { font-size: .88rem; color: var(--soft) }
.good { --edge: #2f8f5b } .some { --edge: var(--w1) } .open { --edge: var(--soft) }
main { max-width: 92rem }
p { max-width: 62rem }
pre { user-select: all; white-space: pre-wrap; overflow-wrap: anywhere }
details { margin: .5rem 0 } summary { cursor: pointer }
details pre { max-height: 14rem; overflow-y: auto }
"""


def whole_page(description: Description, readiness: Readiness, named: str) -> str:
    """The page as HTML. `description` is the result of `reports.inspect.describe`, `named` as in `to_measure`."""
    model, run = description["model"], to_measure(readiness, named)
    sizes = (
        ""
        if "no_table" in model
        else f", {counted(model['num_layers'], 'layer')} of hidden size {model['hidden_size']}"
    )
    when = "" if description["iteration"] is None else f" at iteration {description['iteration']}"
    maps = {"What to do": _remedies_panel(readiness)}
    for measure in _measures(readiness):
        if any(measure.value(health) is not None for health in readiness.roles):
            maps[measure.name] = _panel(readiness, measure)
    limits = [(name.replace("_", " "), limit.shown, limit.source) for name, limit in ALL.items()]
    parts = [
        paragraph(f"{description['architecture']}{sizes}{when}."),
        _cards(readiness),
        paragraph(rests_on(readiness)),
        *(_folded(f"For a recipe: {names} scaling", text) for names, text in keep_bf16(readiness)),
        *(_folded(f"For an export in {scheme}", text) for scheme, text in left_out_of_four_bits(readiness)),
        *map(paragraph, readiness.notes),
        *([paragraph("To measure the rest:"), *(commands([line]) for line in run)] if run else []),
        heading("By layer and role"),
        paragraph("Point at a cell, or tap it, for its name and number. Of experts, each cell has the worst."),
        heat.tabs(maps),
        *map(html_table, four_bit_tables(readiness)),
        *([html_table(findings(readiness))] if any(health.findings for health in readiness.roles) else []),
        html_table(Table("Limits that the verdict rests on", ("limit", "value", "source"), limits)),
        html_table(summary(description)),
    ]
    name = own_name(Path(str(description["path"])))
    return page(f"Is {name} ready for FP8?", parts, style=heat.STYLE + _CARDS)


def _cards(readiness: Readiness) -> str:
    """A verdict for each scaling."""
    cards = []
    for scaling, verdict in readiness.verdicts.items():
        colour = "open" if not verdict.ready else "some" if verdict.kept or verdict.margin else "good"
        name = f"{NAMES[scaling][0].upper()}{NAMES[scaling][1:]} scaling"
        cards.append(f'<div class="card {colour}"><b>{escaped(name)}</b><span>{escaped(verdict.words)}</span></div>')
    return f'<div class="cards">{"".join(cards)}</div>'


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escaped(title)}</summary>{commands([text])}</details>"


@dataclass(frozen=True)
class _Measure:
    """A heat map: its `name`, the `value` of a role (None: not known), the colour `scale`, how to write a value in
    `words`, and a `note` above the map."""

    name: str
    value: Callable[[RoleHealth], float | None]
    scale: ColourScale
    words: Callable[[float], str]
    note: str


_SHARES = ColourScale((0, 1e-5, 1e-4, 1e-3, UNDERFLOW.value), (0.1, 0.5, 1), share_in_words)
_CLAMPED = ColourScale((0, SATURATION.value), (1e-4, 1e-3, 1), share_in_words)


def _plain(value: float) -> str:
    """Three digits: `0.0123`, `4.5`, `1.2e+05`."""
    return f"{value:,.0f}" if 100 <= value < 1e5 else f"{value:.2g}"


def _times(value: float) -> str:
    return f"{value:.2g}×"


def _measures(readiness: Readiness) -> list[_Measure]:
    amaxes = [health.amax for health in readiness.roles if health.amax and math.isfinite(health.amax)]
    low, high = min(amaxes, default=1.0), max(amaxes, default=1.0)
    steps = [low * (high / low) ** (number / heat.COOL) for number in range(1, heat.COOL)] + [high]  # equal factors
    return [
        *(
            _Measure(
                f"Zeros: {NAMES[scaling]}",
                lambda health, scaling=scaling: health.underflow(scaling),  # type: ignore[misc]
                _SHARES,
                share_in_words,
                f"Share of elements that become zero under {NAMES[scaling]} scaling. Warm: beyond {UNDERFLOW.shown}.",
            )
            for scaling in FP8_SCALINGS
        ),
        _Measure(
            "Saturation: delayed",
            lambda health: health.saturation("delayed"),
            _CLAMPED,
            share_in_words,
            "Share of elements beyond what the scale of earlier steps holds; no other scaling saturates. Warm: "
            f"beyond {SATURATION.shown}.",
        ),
        _Measure(
            "Kurtosis",
            lambda health: health.kurtosis,
            ColourScale((3.5, 10, 30, 100, KURTOSIS.value), (1e4, 1e5, 1e6), _plain),
            _plain,
            f"3 for a Gaussian; it rises with outliers. Warm: beyond {KURTOSIS.shown}, a limit for activations and "
            "weights; gradients are heavy-tailed in health.",
        ),
        _Measure(
            "Amax",
            lambda health: health.amax,
            ColourScale(steps, (), _plain),
            _plain,
            "The largest magnitude that was seen, in five steps of equal factors.",
        ),
        _Measure(
            "Growth",
            lambda health: health.history.growth if health.history else None,
            ColourScale((1.1, 1.5, 2, GROWTH.value), (8, 32, 128), _times),
            _times,
            f"Newest amaxes over oldest ones in the history, medians of a quarter each. Warm: beyond {GROWTH.shown}.",
        ),
        _Measure(
            "Headroom",
            lambda health: -headroom(health.history) if health.history and health.history.used else None,
            ColourScale((-8, -4, -2, -1, 1e-6), (1, 4, 16), lambda value: f"{round(-value, 3) + 0:g} binades"),
            lambda value: f"{-value:.1f}" if abs(value) > 0.05 else "0",
            "Binades between the newest amax under the delayed scale and the largest code. Below 0 it saturates.",
        ),
    ]


def _panel(readiness: Readiness, measure: _Measure) -> str:
    def cell(health: RoleHealth) -> Cell:
        value, name = measure.value(health), f"{health.module}, {health.role}"
        if value is None or not math.isfinite(value):
            return Cell("unknown", "?" if value is None else "inf", f"{name}: not known")
        return Cell(measure.scale.step(value), measure.words(value), f"{name}: {measure.words(value)}")

    return paragraph(measure.note) + measure.scale.legend() + _map(readiness, cell)


def _remedies_panel(readiness: Readiness) -> str:
    steps = {"repair": "w2", "bf16": "w2", "recalibrate": "w1", "margin": "w0", "watch": "c3"}
    texts = {"repair": "broken", "bf16": "BF16", "recalibrate": "cal.", "margin": "margin", "watch": "watch"}

    def cell(health: RoleHealth) -> Cell:
        name = f"{health.module}, {health.role}"
        if not health.findings:
            known = bool(health.measured or health.history)
            return Cell("c0", "ok", f"{name}: nothing found") if known else Cell("unknown", "?", f"{name}: not known")
        worst = min((finding.remedy for finding in health.findings), key=list(REMEDIES).index)
        return Cell(steps[worst], texts[worst], f"{name}: {'; '.join(finding.words for finding in health.findings)}")

    words = "The strongest finding under any scaling. The verdicts above are by scaling."
    items = [(steps[remedy], text) for remedy, text in REMEDIES.items()]
    return (
        paragraph(words)
        + heat.legend([("c0", "nothing found"), *items, ("unknown", "not known")])
        + _map(readiness, cell)
    )


def _map(readiness: Readiness, cell: Callable[[RoleHealth], Cell]) -> str:
    rows: dict[str, dict[Column, Cell]] = {}
    columns: dict[Column, None] = {}
    for health in readiness.roles:
        group, layer, kind = split_name(health.module)
        kind = kind.removeprefix("transformer_layer.")  # of Megatron's layers of multi-token prediction
        label = (
            "" if layer is None else str(layer) if group == "decoder.layers" else f"{group.partition('.')[0]} {layer}"
        )
        columns[kind, health.role] = None
        rows.setdefault(label, {})[kind, health.role] = cell(health)
    kinds = list(dict.fromkeys(kind for kind, _ in columns))
    return heat.heat_map(rows, sorted(columns, key=lambda column: kinds.index(column[0])))
