"""A result of `benchmarks/gpu.py` as Markdown tables. What failed is listed first."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpu_sections.common import SHAPES, SMALL, Row

Result = Mapping[str, Any]


def tables(result: Result) -> str:
    parts = [", ".join(f"{key} {value}" for key, value in result["machine"].items() if value is not None)]
    parts += [_failures(result)]
    makers = {"truth": _truth, "speed": _speed, "curves": _curves, "products": _products}
    parts += [makers[name](_good(section["rows"])) for name, section in result["sections"].items()]
    return "\n\n".join(part for part in parts if part)


def _good(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if "error" not in row]


def _failures(result: Result) -> str:
    lines = []
    for name, section in result["sections"].items():
        if section["ended"] != "complete":
            lines.append(f"- **{name} {section['ended']}**")
        for row in section["rows"]:
            if "error" in row:
                what = ", ".join(str(value) for key, value in row.items() if key != "error")
                lines.append(f"- {name}, {what}: {row['error']}")
    return "\n".join(lines)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _truth(rows: list[Row]) -> str:
    modules = [
        (row["module"], row["recipe"], ", ".join(f"{name} {value:.0f}" for name, value in row["decibels"].items()))
        for row in rows
        if "module" in row
    ]
    lines = []
    for row in (row for row in rows if "of" in row):
        if row["of"] == "replay":
            lines.append(f"- replayed: {row['equal']} role updates equal to the bit, {row['different']} not")
        elif row["of"] == "free running":
            gaps = f"{row['mean_of_last_20']:+.3%} in the last 20 steps, {row['worst']:+.3%} at worst"
            lines.append(f"- free running, {row['recipe']}, {row['steps']} steps: {gaps}")
        else:
            ratios = ", ".join(
                f"{role} {low:.2f} to {high:.2f} (median {middle:.2f})"
                for role, (low, middle, high) in row["collected_over_recorded"].items()
            )
            lines.append(f"- amaxes collected in BF16 over those that FP8 recorded: {ratios}")
    return _table(("module", "recipe", "decibels, at least"), modules) + "\n\n" + "\n".join(lines)


def _speed(rows: list[Row]) -> str:
    steps = {(r["shape"], r["variant"], r["layers"]): r for r in rows if "tokens_per_second" in r}
    made = []
    for shape in (*SHAPES, *SMALL):
        few, many = shape.measured
        base = steps.get((shape.name, "bf16", many))
        for name, variant, layers in steps:
            if name != shape.name or layers != many or base is None:
                continue
            row = steps[name, variant, layers]
            spread = f"{row['least'] * 1000:.1f} to {row['most'] * 1000:.1f}"
            memory, of_base = row["memory_gb"], base["memory_gb"]
            made.append(
                (
                    f"{name}, {layers} of {shape.layers} layers",
                    variant,
                    f"{row['tokens_per_second']:,.0f}",
                    f"{row['seconds'] * 1000:.1f} ({spread})",
                    f"{row['tflops']:.0f}",
                    f"{base['seconds'] / row['seconds']:.2f}",
                    _whole(steps, shape, variant, few, many),
                    "" if memory is None else f"{memory:.1f} GB ({memory / of_base - 1:+.0%})",
                )
            )
    heads = ("shape", "by", "tokens/s", "step, ms", "TFLOP/s", "speed over BF16", "all layers, estimated", "memory")
    return _table(heads, made) + "\n\n" + _profiles(rows)


def _whole(steps: Mapping[tuple[str, str, int], Row], shape: Any, variant: str, few: int, many: int) -> str:
    """Speed of the whole model over BF16, from what a layer adds."""
    times = []
    for name in ("bf16", variant):
        pair = [steps.get((shape.name, name, layers)) for layers in (few, many)]
        if None in pair:
            return ""
        low, high = (row["seconds"] for row in pair if row)
        times.append(high + (shape.layers - many) * (high - low) / (many - few))
    return f"{times[0] / times[1]:.2f}"


def _profiles(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        where = f"{row['shape']}, {row['layers']} layers, {row['variant']}"
        if "profile" in row:
            spent = ", ".join(f"{kind} {value:.1f}" for kind, value in row["ms"].items() if value >= 0.05)
            lines.append(f"- {where}: a step of {row['seconds'] * 1000:.1f} ms is {spent}")
        elif "without" in row:
            lines.append(f"- {where}: without the host's reads {row['read'] / row['unread']:.3f} times as fast")
    return "\n".join(lines)


def _curves(rows: list[Row]) -> str:
    made = []
    for row in (row for row in rows if "losses" in row):
        gaps = (f"{row['early']:.3%}", f"{row['mean']:+.3%}") if "early" in row else ("", "")
        made.append((row["run"], f"{row['losses'][-1]:.4f}", *gaps))
    return _table(("run", "last loss", "largest gap of the first 20 steps", "mean gap of the rest"), made)


def _products(rows: list[Row]) -> str:
    keyed: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows:
        keyed.setdefault((row["shape"], row["linear"], row["tokens"]), {})[row["by"]] = row
    kinds = list(dict.fromkeys(row["by"] for row in rows))
    made = []
    for (shape, linear, tokens), by in keyed.items():
        cells = [f"{by[kind]['tflops']:.1f}" if kind in by else "" for kind in kinds]
        made.append((shape, linear, str(tokens), *cells))
    return "TFLOP/s:\n\n" + _table(("shape", "linear", "tokens", *kinds), made)
