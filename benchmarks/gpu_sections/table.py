"""A result of `benchmarks/gpu.py` as Markdown tables. What failed or was refused is listed first."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpu_sections.common import SHAPES, SMALL, Row

Result = Mapping[str, Any]


def tables(result: Result) -> str:
    parts = [", ".join(f"{key} {value}" for key, value in result["machine"].items() if value is not None)]
    parts += [_missing(result)]
    for name, section in result["sections"].items():
        if rows := _good(section["rows"]):
            parts += [f"### {TITLES[name]}", MAKERS[name](rows)]
    return "\n\n".join(part for part in parts if part)


def _good(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if "error" not in row and "refused" not in row]


def _missing(result: Result) -> str:
    lines = []
    for name, section in result["sections"].items():
        if section["ended"] != "complete":
            lines.append(f"- **{name} {section['ended']}**")
        for row in section["rows"]:
            if "error" in row:
                what = ", ".join(str(value) for key, value in row.items() if key not in ("error", "trace"))
                lines.append(f"- {name}, {what}: {row['error']}")
        lines += [f"- {name}, {row['recipe']}: {row['refused']}" for row in section["rows"] if "refused" in row]
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
                    f"{row['estimated_gb']:.1f} GB" if "estimated_gb" in row else "",
                )
            )
    heads = ("shape", "by", "tokens/s", "step, ms", "TFLOP/s", "speed over BF16", "all layers, estimated", "memory")
    return _table((*heads, "`--dry-run`'s estimate"), made)


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


def _profile(rows: list[Row]) -> str:
    """ms by kind beside BF16's, and what keeps a step from its GEMMs' ratio."""
    found = {row["variant"]: row for row in rows if "profile" in row}
    if not found:
        return ""
    kinds = list(next(iter(found.values()))["ms"])
    lines = [(kind, *(f"{row['ms'][kind]:.1f}" for row in found.values())) for kind in kinds]
    lines.append(("**step**", *(f"{row['seconds'] * 1000:.1f}" for row in found.values())))
    lines.append(("a step alone", *(f"{row['waited_for'] * 1000:.1f}" for row in found.values())))
    lines.append(("kernels", *(str(row["launches"]) for row in found.values())))
    told = [_held_back(variant, row, found["bf16"]) for variant, row in found.items() if "bf16" in found]
    told += [
        f"- {row['variant']}, {row['passes']} micro-batches of one row: weights cast once, an update is "
        f"{row['each'] / row['once']:.3f} times as fast"
        for row in rows
        if "passes" in row
    ]
    told += [
        f"- {row['shape']}, {row['layers']} layers, {row['variant']}: as CUDA graphs a step is "
        f"{row['kernels'] / row['replayed']:.3f} times as fast"
        for row in rows
        if "graphs" in row
    ]
    told += [
        f"- collecting histories in BF16: a step takes {row['collecting'] / row['plain']:.3f} times as long"
        for row in rows
        if "collecting" in row
    ]
    where = next(iter(found.values()))
    title = f"Milliseconds of a step, {where['shape']}, {where['layers']} layers:\n\n"
    return title + _table(("", *found), lines) + "\n\n" + "\n".join(filter(None, told))


def _held_back(variant: str, row: Row, base: Row) -> str:
    """A step in BF16 is its GEMMs and the rest; FP8 makes the one shorter and may make the other longer."""
    if variant == "bf16" or not (row["ms"]["GEMM"] and base["ms"]["GEMM"]):
        return ""
    step, of_base = row["seconds"] * 1000, base["seconds"] * 1000
    gemms, rest = base["ms"]["GEMM"] / row["ms"]["GEMM"], of_base - base["ms"]["GEMM"]
    longer = {kind: row["ms"][kind] - base["ms"][kind] for kind in row["ms"] if kind != "GEMM"}
    most = sorted(longer.items(), key=lambda one: -one[1])[:3]
    added = ", ".join(f"{kind} {value:+.1f} ms" for kind, value in most if value > 0.05) or "nothing"
    return (
        f"- {variant}: GEMMs {gemms:.2f} times as fast, the step {of_base / step:.2f}. {rest / of_base:.0%} of BF16's "
        f"step is no GEMM: with that unchanged it would be {of_base / (row['ms']['GEMM'] + rest):.2f}. Added: {added}"
    )


def _peers(rows: list[Row]) -> str:
    steps = [row for row in rows if "seconds" in row]
    base = next((row for row in steps if row["variant"] == "bf16"), None)
    made = [
        (
            row["variant"],
            f"{row['tokens_per_second']:,.0f}",
            f"{row['seconds'] * 1000:.1f} ({row['least'] * 1000:.1f} to {row['most'] * 1000:.1f})",
            f"{row['tflops']:.0f}",
            f"{base['seconds'] / row['seconds']:.2f}" if base else "",
            "" if row["memory_gb"] is None else f"{row['memory_gb']:.1f} GB",
            f"{row['first_step']:.1f}",
        )
        for row in steps
    ]
    heads = ("by", "tokens/s", "step, ms", "TFLOP/s", "speed over our BF16", "memory", "first step, s")
    told = "".join(f"\n\n{row['absent']} is not installed." for row in rows if "absent" in row)
    where = f"{rows[0]['shape']}, {steps[0]['layers']} layers:\n\n" if steps else ""
    return where + _table(heads, made) + told


def _curves(rows: list[Row]) -> str:
    made = []
    for row in (row for row in rows if "losses" in row):
        gaps = (f"{row['early']:.3%}", f"{row['mean']:+.3%}") if "early" in row else ("", "")
        made.append((row["run"], f"{row['losses'][-1]:.4f}", *gaps))
    return _table(("run", "last loss", "largest gap of the first 20 steps", "mean gap of the rest"), made)


def _products(rows: list[Row]) -> str:
    attention, rows = ([row for row in rows if ("attention" in row) is wanted] for wanted in (True, False))
    keyed: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows:
        keyed.setdefault((row["shape"], row["linear"], row["tokens"]), {})[row["by"]] = row
    kinds = list(dict.fromkeys(row["by"] for row in rows))
    made = []
    for (shape, linear, tokens), by in keyed.items():
        cells = [f"{by[kind]['tflops']:.1f}" if kind in by else "" for kind in kinds]
        made.append((shape, linear, str(tokens), *cells))
    gemms = "TFLOP/s:\n\n" + _table(("shape", "linear", "tokens", *kinds), made)
    layers = [
        (
            row["shape"],
            row["attention"],
            str(row["window"] or "none"),
            f"{row['seconds'] * 1000:.2f} ({row['least'] * 1000:.2f} to {row['most'] * 1000:.2f})",
            "" if row["memory_gb"] is None else f"{row['memory_gb']:.2f} GB",
        )
        for row in attention
    ]
    heads = ("shape", "attention over", "window", "ms, forward and backward", "memory")
    return gemms + "\n\nOne layer's attention:\n\n" + _table(heads, layers)


def _tests(rows: list[Row]) -> str:
    ran = [row for row in rows if "passed" in row]
    skipped: dict[str, int] = {}
    for row in rows:
        if "skipped" in row:
            skipped[row["skipped"]] = skipped.get(row["skipped"], 0) + 1
    lines = [f"{len(ran)} tests passed in {sum(row['seconds'] for row in ran):.0f} s."]
    lines += [f"- {count} skipped: {reason}" for reason, count in skipped.items()]
    lines += [f"- {row['test']}: {row['found']}" for row in ran if row["found"]]
    return "\n".join(lines)


def _serving(rows: list[Row]) -> str:
    speeds = {(row["batch"], row["precision"]): row for row in rows if "batch" in row and "failed" not in row}
    made = []
    for (number, precision), row in sorted(speeds.items()):
        base = speeds.get((number, "BF16"))
        cells = []
        for kind in ("prefill, tokens/s", "decode, tokens/s"):
            ratio = f" ({row[kind] / base[kind]:.2f})" if base and precision != "BF16" else ""
            cells.append(f"{row[kind]:,.0f}{ratio}")
        made.append((str(number), precision, *cells, f"{row['peak, GB']:.1f}"))
    heads = ("batch", "precision", "prefill, tokens/s (over BF16)", "decode, tokens/s (over BF16)", "peak, GB")
    held = [(row["precision"], f"{row['held, GB']:.2f}") for row in rows if "held, GB" in row]
    largest = [(row["precision"], row["cache"], str(row["largest batch"])) for row in rows if "largest batch" in row]
    tables = ((("model", "held, GB"), held), (heads, made), (("model", "cache", "largest batch"), largest))
    return "\n\n".join(_table(*each) for each in tables)


def _casts(rows: list[Row]) -> str:
    made = []
    for row in rows:
        same = f"{row['equal']} of {row['equal'] + row['different']}" if "equal" in row else ""
        rate = f"{row['gb'] / row['seconds']:.2f}"
        made.append((row.get("scheme", ""), row["by"], f"{row['seconds']:.2f}", rate, same))
    return _table(("scheme", "by", "s", "GB/s", "tensors whose codes are the export's"), made)


MAKERS = {
    "tests": _tests,
    "truth": _truth,
    "speed": _speed,
    "profile": _profile,
    "peers": _peers,
    "curves": _curves,
    "products": _products,
    "serving": _serving,
    "casts": _casts,
    "core": _peers,
}
TITLES = {
    "tests": "Held to limits",
    "truth": "Emulation and Transformer Engine",
    "speed": "A training step",
    "profile": "Where a step's time goes",
    "peers": "Others, in one process with ours",
    "curves": "Switching the precision",
    "products": "GEMMs alone",
    "serving": "Inference",
    "casts": "Casts on the GPU",
    "core": "Megatron-Core as the engine, in one process with ours",
}
