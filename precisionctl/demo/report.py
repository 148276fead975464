"""The demo's results, good or bad: a table, the loss curves, and a page with both."""

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from precisionctl.demo.story import BRANCH, CommandRun, DemoResults
from precisionctl.reports import page, plot
from precisionctl.reports.curves import Curve, read_curve
from precisionctl.reports.table import Table, percent

AIM = 0.01
"""The largest mean gap to BF16 that counts as good: NVIDIA published a gap within one percent for Llama2-7B in FP8 with
delayed scaling."""

EARLY_STEPS = 20
"""Steps after the switch to FP8 in which a cold start is visible."""

PICTURE, PAGE = "curves.png", "report.html"


def curves(folder: Path) -> list[Curve]:
    """The loss curves of BF16 and of the FP8 runs; those that continued from weights alone are drawn after the
    branches' last step."""
    seeded, cold = _curve(folder, "fp8"), _curve(folder, "fp8-cold")
    bf16 = {**_curve(folder, "start"), **_curve(folder, "bf16"), **_later(_curve(folder, "bf16-on"))}
    return [
        Curve("BF16 throughout", bf16),
        Curve("BF16, then FP8 from a cold start", cold),
        Curve("BF16, then FP8 seeded by warm-up", seeded),
        Curve("FP8 going on after Hugging Face and back", _later(_curve(folder, "fp8-on"))),
    ]


def _curve(folder: Path, run: str) -> Mapping[int, float]:
    return read_curve(folder / run, run).losses


def _later(losses: Mapping[int, float]) -> Mapping[int, float]:
    return {BRANCH + step: loss for step, loss in losses.items()}


def table(results: DemoResults, folder: Path) -> Table:
    """A row for each promise of the project: what was measured, the limit that it is held against, and whether it
    keeps it. Rows without a limit differ from one machine to another by more than a precision makes."""
    broken, kept = len(results.rules.result["findings"]), results.rules.code == 0
    rows = [
        _exact("Hugging Face to Megatron: tensors that are the same to the last bit", results.there),
        *_gaps(results.gaps.result["runs"]),
        _early(folder),
        _exact(
            "FP8 checkpoint to Hugging Face and back: weights and FP8 state the same to the last bit", results.state
        ),
        _exact("Going on in FP8 from there and from the checkpoint itself: the same to the last bit", results.last_bit),
        _decrease(folder),
        ("The export keeps vLLM's rules", f"{broken} broken" if broken else "all", "all", _verdict(kept)),
        _exact("Its codes are the encoding of the trained weights", results.codes),
        *_perplexities(results.perplexity),
    ]
    return Table("What was measured", ("", "measured", "limit", "as promised"), rows)


TableRow = tuple[str, str, str, str]


def _verdict(good: bool) -> str:
    return "yes" if good else "NO"


def _exact(what: str, ran: CommandRun) -> TableRow:
    tensors = ran.result["tensors"]
    equal = sum(tensor["status"] in ("exact", "encoded") for tensor in tensors)
    return what, f"{equal} of {len(tensors)} tensors", "all", _verdict(ran.code == 0)


def _gaps(runs: Sequence[Mapping[str, Any]]) -> list[TableRow]:
    names = {"fp8": "FP8 seeded by warm-up", "fp8-cold": "FP8 from a cold start"}
    rows = []
    for run in runs:
        judged = (percent(AIM), _verdict(abs(run["mean"]) <= AIM)) if run["run"] == "fp8" else ("-", "-")
        what = f"{names[run['run']]} against BF16: mean loss of the last 100 steps"
        rows.append((what, percent(run["mean"]), *judged))
    return rows


def _early(folder: Path) -> TableRow:
    bf16 = Curve("bf16", _curve(folder, "bf16"))
    gaps = (Curve(run, _curve(folder, run)).against(bf16).values() for run in ("fp8", "fp8-cold"))
    seeded, cold = (max(list(each)[:EARLY_STEPS], key=abs) for each in gaps)
    what = f"Worst gap in the first {EARLY_STEPS} steps of FP8: seeded, and from a cold start"
    measured = f"{percent(seeded)}, {percent(cold)}"
    return what, measured, "half of cold", _verdict(abs(seeded) <= abs(cold) / 2)


def _decrease(folder: Path) -> TableRow:
    values = list(_curve(folder, "sft").values())
    first, last = sum(values[:10]) / 10, sum(values[-10:]) / 10
    what = "SFT in BF16 from the FP8 checkpoint: loss, first and last ten steps"
    return what, f"{first:.3f}, {last:.3f}", "falls", _verdict(last < first)


def _perplexities(evals: Mapping[str, CommandRun]) -> list[TableRow]:
    names = {"bf16": "BF16 run", "fp8": "FP8 run", "fp8-vllm": "FP8 export"}
    reference = evals["bf16"].result["perplexity"]
    rows = []
    for run, ran in evals.items():
        found = ran.result
        shown = f"{found['perplexity']:.3f}"
        if run != "bf16":
            shown += f" ({percent(found['perplexity'] / reference - 1)})"
        rows.append((f"Held-out perplexity of the {names[run]}, computed in {found['precision']}", shown, "-", "-"))
    return rows


def write(results: DemoResults, folder: Path, measured: Table) -> None:
    """Write the picture and the page into the demo's folder."""
    drawn = curves(folder)
    plot.write_png(drawn, folder / PICTURE)
    minutes = sum(ran.seconds for ran in results.ran) / 60
    intro = (
        f"A random Llama of 2.4 million parameters, trained on the sources of Python's standard library: from BF16 to "
        f"FP8, to Hugging Face and back, to BF16 fine-tuning, and out to FP8 inference. {minutes:.1f} minutes on "
        f"{os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}, PyTorch "
        f"{torch.__version__}; FP8 emulated with Transformer Engine's arithmetic."
    )
    timed = Table("Commands", ("", "seconds"), [(ran.line, f"{ran.seconds:.1f}") for ran in results.ran])
    parts = [page.paragraph(intro), plot.svg(drawn), page.html_table(measured), page.html_table(timed)]
    (folder / PAGE).write_text(page.page("From BF16 to FP8 and back", parts), encoding="utf-8")
