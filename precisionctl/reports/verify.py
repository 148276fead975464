"""What `verify` found, for people."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import get_args

from precisionctl.engines.rules.rule import EngineRule, Finding
from precisionctl.errors import brief
from precisionctl.planning.checks import without_numbers
from precisionctl.reports.table import Table
from precisionctl.sizes import counted
from precisionctl.verify.code_comparison import CodesComparison
from precisionctl.verify.compare import Comparison
from precisionctl.verify.engine_rules import NO_CODES
from precisionctl.verify.not_compared import OF_THE_MODEL
from precisionctl.verify.tensor_comparison import Status, TensorComparison

SHOWN = 20
"""How many differing tensors are listed; `--json` has all."""

FEW = 5
"""How many tensors are listed if settings differ, too: then it is two models, and tensors tell no more than settings
do."""


def tables(comparison: Comparison) -> list[Table]:
    """Tables of the settings that differ, the number of tensors with each status, the worst of those that differ, the
    settings of the optimizer and the FP8 state that differ, and what of the model was not compared."""
    counts = []
    for status in get_args(Status):
        if tensors := [tensor for tensor in comparison.tensors if tensor.status == status]:
            sqnr = min((t.sqnr_db for t in tensors if t.sqnr_db is not None), default=None)
            error = max((t.max_abs_error for t in tensors if t.max_abs_error is not None), default=None)
            differing = [t.differing for t in tensors if t.differing is not None]
            values = f"{sum(differing):,}" if differing else "-"
            counts.append((status, str(len(tensors)), _number(sqnr, ".1f"), _number(error, ".3g"), values))
    columns = ("status", "count", "lowest SQNR, dB", "largest error", "values that differ")
    found = [Table("Tensors", columns, counts)]
    if settings := comparison.settings:
        found.insert(0, _first("Settings that differ", ("",), [(line,) for line in settings]))
    different = [tensor for tensor in comparison.tensors if not tensor.equal]
    if different:
        found.append(_worst(different, FEW if settings else SHOWN))
    if comparison.codes:
        found.append(codes(comparison.codes))
    if told := [(t.name, t.remark) for t in comparison.tensors if t.remark]:
        found.append(_first("What codes and rounding have lost", ("tensor", ""), told))
    if comparison.optimizer:
        title = "Settings of the optimizer that differ"
        found.append(_first(title, ("",), [(line,) for line in comparison.optimizer]))
    if comparison.fp8 is not None:
        lines = comparison.fp8 or ["equal to the last bit"]
        found.append(_first("FP8 state", ("",), [(line,) for line in lines]))
    if rows := [(each.topic, each.what, each.why) for each in comparison.not_compared if each.topic in OF_THE_MODEL]:
        found.append(Table("Not compared", ("", "here", "what that is"), rows))
    return found


def _first(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    """A table of the first SHOWN rows, which says of how many."""
    cut = f", the first {SHOWN} of {len(rows):,}" if len(rows) > SHOWN else ""
    return Table(title + cut, columns, rows[:SHOWN])


def left_out(comparison: Comparison) -> list[str]:
    """What was not compared besides, in a line; none where nothing was left out."""
    besides = [f"{each.topic} ({each.what})" for each in comparison.not_compared if each.topic not in OF_THE_MODEL]
    return [brief(f"Not compared: {', '.join(besides)}.")] if besides else []


def verdict(comparison: Comparison) -> str:
    """The answer in a line."""
    count, settings, states = len(comparison.tensors), len(comparison.settings), len(comparison.fp8 or ())
    different = sum(not tensor.equal for tensor in comparison.tensors)
    if comparison.equal:
        statuses = Counter(tensor.status for tensor in comparison.tensors)
        words = [f"{n} of them by their codes"] if (n := statuses["encoded"]) else []
        words += [f"{n} rounded"] if (n := statuses["rounded"]) else []
        return f"The same: {', '.join(['all ' + counted(count, 'tensor'), *words])}."
    of_zeros = sum(tensor.status == "signs of zeros" for tensor in comparison.tensors)
    alone = f" ({of_zeros:,} in the signs of zeros alone)" if of_zeros else ""
    of_all = f"{different:,} of {counted(count, 'tensor')}{alone}"
    of_state = f"{counted(states, 'difference')} of FP8 state"
    optimizers = len(comparison.optimizer)
    of_optimizer = f"{counted(optimizers, 'setting')} of the optimizer"
    found = {of_all: different, counted(settings, "setting"): settings, of_optimizer: optimizers, of_state: states}
    return f"Not the same: {', '.join(what for what, number in found.items() if number)}."


def codes(weights: Sequence[CodesComparison]) -> Table:
    """Weights that are codes: those with the most codes changed, and all together."""
    worst = sorted(weights, key=lambda weight: (weight.idempotent, -_share(weight)))[:SHOWN]
    rows = [_weight(weight) for weight in worst]
    if len(weights) > 1:
        together = CodesComparison(
            f"all {len(weights)}",
            sum(weight.codes for weight in weights),
            sum(weight.changed for weight in weights),
            (min(weight.scale_ratio[0] for weight in weights), max(weight.scale_ratio[1] for weight in weights)),
            min(weight.sqnr_db for weight in weights),
            all(weight.idempotent for weight in weights),
        )
        rows.append(_weight(together))
    columns = ("weight", "codes", "changed", "scale ratio", "SQNR, dB", "the same after BF16")
    return Table("Weights that are codes", columns, rows)


def _share(weight: CodesComparison) -> float:
    """The share of a weight's codes that changed."""
    return weight.changed / max(1, weight.codes)


def _weight(weight: CodesComparison) -> tuple[str, ...]:
    low, high = weight.scale_ratio
    ratio = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    share = f"{weight.changed:,} ({_share(weight):.2%})" if weight.changed else "0"
    sqnr, idempotent = _number(weight.sqnr_db, ".1f"), "yes" if weight.idempotent else "no"
    return (weight.name, f"{weight.codes:,}", share, ratio, sqnr, idempotent)


def _worst(different: Sequence[TensorComparison], most: int) -> Table:
    """Those that cannot be subtracted come first: they are on one side only, or of two shapes."""
    worst = sorted(different, key=lambda tensor: (tensor.sqnr_db is not None, tensor.sqnr_db or 0.0))[:most]
    rows = []
    for t in worst:
        status = f"{t.status} {t.shapes}" if t.shapes else t.status
        numbers = map(_number, (t.sqnr_db, t.max_abs_error, t.differing), (".1f", ".3g", ","))
        rows.append((t.name, status, t.dtypes, *numbers))
    title = counted(len(different), "tensor differs", "tensors differ")
    title += f", the worst {most}" if len(different) > most else ""
    return Table(title, ("tensor", "status", "dtypes", "SQNR, dB", "largest error", "values that differ"), rows)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


_NUMBERS = re.compile(r"\b\d[\d.e+-]*")
"""Numbers by themselves, as in shapes and scales, and not those in the name of a dtype."""


def rules(findings: Sequence[Finding], title: str) -> list[Table]:
    """The rules of an engine of that name that a directory breaks: as a list, in which a name stays whole. Findings
    that differ only in numbers, as those of layers and experts, are one, shown by the first."""
    if not findings:
        return [Table(title, ("",), [("every rule is kept",)])]
    if [finding.rule for finding in findings] == [NO_CODES]:
        return [Table(title, ("",), [(findings[0].what,), (f"{NO_CODES.text}.",)])]
    alike: dict[tuple[str, str, EngineRule], list[Finding]] = {}
    for finding in findings:
        kind = (without_numbers(finding.where), _NUMBERS.sub("*", finding.what), finding.rule)
        alike.setdefault(kind, []).append(finding)
    rows: list[tuple[str, str]] = []
    for (pattern, _, rule), (first, *others) in alike.items():
        places = [("where", pattern), ("count", f"{1 + len(others):,}"), ("the first", first.where)]
        rows += places if others else [("where", first.where)]
        rows += [("what", first.what), ("rule", rule.text), ("loads", "no" if rule.fatal else "yes")]
        rows += [("source", rule.source), ("", "")]
    return [Table(title, ("", ""), rows[:-1])]
