"""The verdict on FP8: for a terminal, with the most important findings, and as JSON, with everything."""

import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from precisionctl.codes.four_bit_loss import FORMATS, GAUSSIAN_DB, GAUSSIAN_ZEROS
from precisionctl.codes.statistics import FP8_SCALINGS, NAMES
from precisionctl.fp8.state import IN_USE
from precisionctl.quant_methods.base import FOUR_BITS
from precisionctl.readiness.history import headroom
from precisionctl.readiness.judge import Readiness, RoleHealth
from precisionctl.readiness.patterns import split_name
from precisionctl.readiness.thresholds import ALL, PASSES
from precisionctl.reports.table import Table
from precisionctl.sizes import counted

SHOWN = 12
"""Rows of findings shown on a terminal; the page and JSON have all."""

REMEDIES = {
    "repair": "repair",
    "bf16": "keep in BF16",
    "recalibrate": "calibrate",
    "margin": "give margin",
    "watch": "watch",
}
"""What to do for each remedy, the strongest remedy first."""


def as_json(readiness: Readiness) -> dict[str, Any]:
    """The `readiness` of `inspect --fp8 --json`. Shares are 0 to 1; unknown values are null."""
    modules: dict[str, dict[str, Any]] = {}
    for health in readiness.roles:
        history = health.history
        modules.setdefault(health.module, {})[health.role] = {
            "amax": health.amax,
            "elements": sum(one.elements for one in health.measured),
            "kurtosis": health.kurtosis,
            "underflow": {scaling: health.underflow(scaling) for scaling in FP8_SCALINGS},
            "saturation": {scaling: health.saturation(scaling) for scaling in FP8_SCALINGS},
            "sqnr_db": {scaling: health.sqnr(scaling) for scaling in FP8_SCALINGS},
            "history": asdict(history) | {"headroom_binades": headroom(history)} if history else None,
            "findings": [
                {"remedy": each.remedy, "kind": each.kind, "scalings": list(each.scalings), "words": each.words}
                for each in health.findings
            ],
        }
    return {
        "thresholds": {name: {"value": limit.value, "source": limit.source} for name, limit in ALL.items()},
        "verdicts": {
            scaling: {
                "ready": verdict.ready,
                "words": verdict.words,
                "modules_to_repair": verdict.broken,
                "keep_bf16": list(verdict.keep_bf16),
                "modules_kept": verdict.kept,
                "modules": verdict.modules,
                "modules_to_calibrate": verdict.recalibrate,
                "modules_that_saturate": verdict.margin,
                "unjudged": dict(verdict.unjudged),
            }
            for scaling, verdict in readiness.verdicts.items()
        },
        "four_bits": asdict(readiness.four_bits) if readiness.four_bits else None,
        "passes": readiness.passes,
        "notes": list(readiness.notes),
        "modules": modules,
    }


def tables(readiness: Readiness) -> list[Table]:
    """The tables for a terminal: a verdict for each scaling, a row for each role, and what stands out."""
    verdicts = [(NAMES[scaling], verdict.words) for scaling, verdict in readiness.verdicts.items()]
    words = (
        "measured",
        "recorded",
        "smallest amax",
        "largest amax",
        *(f"zero, {NAMES[each]}" for each in FP8_SCALINGS),
        "kurtosis",
        "growth",
    )
    roles = {
        role: [health for health in readiness.roles if health.role == role]
        for role in dict.fromkeys((*IN_USE, *(health.role for health in readiness.roles)))
    }
    columns = {role: _role_column(modules) for role, modules in roles.items() if modules}
    found = [
        Table("Ready for FP8?", ("scaling", "verdict"), verdicts),
        Table("Worst of each role", ("", *columns), list(zip(words, *columns.values(), strict=True))),
    ]
    found += four_bit_tables(readiness)
    everything = findings(readiness)
    left = len(everything.rows) - SHOWN
    title = f"{everything.title}; {counted(left, 'more row')} in --json and --html" if left > 0 else everything.title
    return found + ([Table(title, everything.columns, everything.rows[:SHOWN])] if everything.rows else [])


def four_bit_tables(readiness: Readiness) -> list[Table]:
    """What exports in four bits would lose of the worst weight of each kind, beside it what FP8 does."""
    cost = readiness.four_bits
    if cost is None:
        return []
    fp8 = {health.module: health for health in readiness.roles if health.role == "weight" and health.measured}
    rows = []
    for kind in dict.fromkeys(split_name(module)[2] for module in cost.sqnr_db):
        modules = [module for module in cost.sqnr_db if split_name(module)[2] == kind]
        lost = [(fp8[name].sqnr("block"), fp8[name].underflow("block")) for name in modules if name in fp8]
        cells = [_lost(lost)]
        cells += [
            _lost([(cost.sqnr_db[name][scheme], cost.underflow[name][scheme]) for name in modules])
            for scheme in FORMATS
        ]
        rows.append((kind, *cells))
    gaussian = [_lost([(GAUSSIAN_DB[scheme], GAUSSIAN_ZEROS[scheme])]) for scheme in FORMATS]
    columns = ("lowest SQNR, most zeros", "128-block FP8", *(FOUR_BITS[scheme] for scheme in FORMATS))
    return [Table("Weights in four bits", columns, [*rows, ("(Gaussian weights)", "-", *gaussian)])]


def _lost(weights: Sequence[tuple[float | None, float | None]]) -> str:
    sqnr, zeros = [each for each, _ in weights if each is not None], [each for _, each in weights if each is not None]
    return f"{min(sqnr):.1f} dB, {share_in_words(max(zeros))}" if sqnr and zeros else "-"


def _role_column(modules: Sequence[RoleHealth]) -> tuple[str, ...]:
    """The cells of one role in the table `Worst of each role`, over the modules that have it."""
    amaxes = [health.amax for health in modules if health.amax is not None]
    growths = [health.history.growth for health in modules if health.history and health.history.growth is not None]
    return (
        str(sum(bool(health.measured) for health in modules)),
        str(sum(health.history is not None for health in modules)),
        f"{min(amaxes):.3g}" if amaxes else "-",
        f"{max(amaxes):.3g}" if amaxes else "-",
        *(_worst((health.underflow(scaling) for health in modules), share_in_words) for scaling in FP8_SCALINGS),
        _worst((health.kurtosis for health in modules), lambda value: f"{value:,.1f}"),
        f"{max(growths):.3g} x" if growths else "-",
    )


def _worst(values: Iterable[float | None], shown: Callable[[float], str]) -> str:
    known = [value for value in values if value is not None]
    return shown(max(known)) if known else "-"


def share_in_words(value: float) -> str:
    """A share of elements (0 to 1) as text: `12 %`, or `<0.001 %` for a share that is not zero but negligible."""
    if 0 < value < 1e-5:
        return "<0.001 %"
    return f"{100 * value:.2g} %" if value < 0.1 else f"{100 * value:.0f} %"


def findings(readiness: Readiness) -> Table:
    """All findings, the strongest remedy first: a row for each kind of finding in a role, with its worst module."""
    groups: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for health in sorted(readiness.roles, key=_severity, reverse=True):
        for each in health.findings:
            groups.setdefault((each.remedy, each.kind, health.role), []).append((health.module, each.words))
    order = list(REMEDIES)
    rows = []
    for (remedy, _, role), found in sorted(groups.items(), key=lambda item: order.index(item[0][0])):
        module, words = found[0]
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        rows.append((REMEDIES[remedy], f"{module}{others}", role, words))
    return Table("What stands out", ("what to do", "module", "role", "why"), rows)


def _severity(health: RoleHealth) -> tuple[float, ...]:
    zeros = max(health.underflow(scaling) or 0.0 for scaling in FP8_SCALINGS)
    growth = (health.history.growth or 0.0) if health.history else 0.0
    return zeros, health.saturation("delayed") or 0.0, growth, health.kurtosis or 0.0


def advice(readiness: Readiness, named: str) -> list[str]:
    """Lines to paste into a recipe, notes on the state, and what to run if something was never measured (`named` as in
    `to_measure`)."""
    lines = [
        line
        for names, text in keep_bf16(readiness)
        for line in (f"# {names} scaling, under [precision] in a recipe", text)
    ]
    for scheme, text in left_out_of_four_bits(readiness):
        lines += [f"# lose too much in {scheme}; FP8 holds them. For an export in {scheme}, in a recipe", text]
    lines += [rests_on(readiness), *readiness.notes]
    if run := to_measure(readiness, named):
        left = [role for role in IN_USE if not readiness.measured.get(role)]
        amaxes = {health.role for health in readiness.roles if health.history}
        unknown, recorded = ([role for role in left if (role in amaxes) is known] for known in (False, True))
        words = [f"Nothing has measured {' and '.join(unknown)}."] if unknown else []
        words += [f"Of {' and '.join(recorded)} amaxes are recorded, and nothing else is measured."] if recorded else []
        lines += [f"{' '.join(words)} To measure:", *run]
    return lines


def keep_bf16(readiness: Readiness) -> list[tuple[str, str]]:
    """The `keep_bf16` lines for a recipe, each with the names of the scalings that it is for."""
    wanted: dict[tuple[str, ...], list[str]] = {}
    for scaling, verdict in readiness.verdicts.items():
        wanted.setdefault(verdict.keep_bf16, []).append(NAMES[scaling])
    return [
        (", ".join(names), f"keep_bf16 = {json.dumps(list(patterns))}")
        for patterns, names in wanted.items()
        if patterns
    ]


def left_out_of_four_bits(readiness: Readiness) -> list[tuple[str, str]]:
    """The same for exports in four bits, by scheme."""
    left_out = readiness.four_bits.left_out if readiness.four_bits else {}
    return [
        (FOUR_BITS[scheme], f"keep_bf16 = {json.dumps(list(patterns))}")
        for scheme, patterns in left_out.items()
        if patterns
    ]


def rests_on(readiness: Readiness) -> str:
    """How much data the verdicts rest on."""
    measured, fewest, most = "Every element of every weight was measured", readiness.passes, readiness.most_passes
    if fewest is None or most is None:
        return f"{measured}; of activations and gradients nothing is known."
    recorded = f"{measured}; activations and gradients were recorded in {counted(most, 'pass', 'passes')}"
    if fewest < most:
        recorded += f", of some modules in {fewest}"
    if most >= PASSES.value:
        return f"{recorded}."
    return f"{recorded}, which is little: a verdict on a run needs {PASSES.shown} or more, over data like the run's."


def to_measure(readiness: Readiness, named: str) -> list[str]:
    """The commands that measure what was never measured, if something was not and `calibrate` can. `named` are the
    words of a shell's command that name the checkpoint, with options that say how it is read."""
    if not readiness.can_calibrate or all(readiness.measured.get(role) for role in IN_USE):
        return []
    left_out = readiness.misfits
    keep = f" --set {shlex.quote(f'precision.keep_bf16={json.dumps(list(left_out))}')}" if left_out else ""
    return [
        f"precisionctl calibrate {named} --data FILE --out STATE{keep}",
        f"precisionctl inspect {named} --fp8 --fp8-state STATE",
    ]
