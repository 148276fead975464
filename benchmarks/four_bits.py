"""Four bits against a file copy of the bytes that are read: INT4 to BF16, and BF16 to NVFP4.

    python benchmarks/four_bits.py [--gigabytes 2.4] [--pairs 7] [--out benchmarks/results/four_bits.json]
        [--into docs/four_bits.md]

Pairs, and what is counted, are those of `convert.py`. INT4 to BF16 writes 3.8 times the bytes that it reads, so a
source of 2.4 GB needs 20 GB of disk. CPU seconds are beside the clock's, as they hold on a busy machine too.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import convert

TASKS = ("export w4a16 to hf", "hf to export nvfp4")
INT4_SHARE = 3.8
"""Bytes of weights in BF16, for those in INT4 in groups of 128."""


def make_source(task: str, directory: Path, gigabytes: float) -> None:
    """A model of that size, in BF16, or in INT4."""
    if task.startswith("hf"):
        convert.make_model(directory, gigabytes)
        return
    from precisionctl.conversion.command import execute

    values = directory.with_name("values")
    convert.make_model(values, gigabytes * INT4_SHARE)
    execute(convert.plan("hf to export w4a16", values, directory))
    shutil.rmtree(values)


def measure(task: str, source: Path, scratch: Path, pairs: int, workers: int) -> dict[str, Any]:
    """Medians over pairs of a copy and a run, of seconds and of CPU seconds, and of their ratios."""
    runs = []
    for _ in range(pairs):
        before = of_children()
        copy, _ = convert.copy_seconds(source, scratch / "copy")
        copy_cpu = (of_children() - before) / 2  # it copies twice
        ours = convert.run_child(task, source, scratch / "ours", workers)
        runs.append({"cp_s": copy, "cp_cpu_s": copy_cpu, "ours_s": ours["seconds"], "ours_cpu_s": ours["cpu"]} | ours)
    sizes = {"read_gb": convert.total_bytes(source) / 1e9, "written_gb": convert.total_bytes(scratch / "ours") / 1e9}
    medians = {key: statistics.median(run[key] for run in runs) for key in ("cp_s", "cp_cpu_s", "ours_s", "ours_cpu_s")}
    medians["speed_over_cp"] = statistics.median(run["cp_s"] / run["ours_s"] for run in runs)
    return {"task": task, **sizes, **medians, "memory_mb": max(run["memory_mb"] for run in runs)}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| | read, written | `precisionctl`: clock, CPU | `cp`: clock, CPU | speed over `cp` |",
        "|---|---|---|---|---|",
    ]
    for name, row in zip(("INT4 to BF16", "BF16 to NVFP4"), rows, strict=True):
        lines.append(
            f"| {name} | {row['read_gb']:.2f} GB, {row['written_gb']:.2f} GB | {row['ours_s']:.1f} s, "
            f"{row['ours_cpu_s']:.1f} s | {row['cp_s']:.2f} s, {row['cp_cpu_s']:.2f} s | {row['speed_over_cp']:.2f} |"
        )
    return "\n".join(lines)


def of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.4)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scratch", type=Path, help="directory on the disk to measure; else the temporary one")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/four_bits.json"))
    parser.add_argument("--into", type=Path, help="a page with a table between `<!-- four-bits -->` marks")
    options = parser.parse_args()
    about = convert.circumstances(options.pairs, options.workers)
    rows = []
    for task in TASKS:
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            source = Path(scratch) / "source"
            make_source(task, source, options.gigabytes)
            rows.append(measure(task, source, Path(scratch), options.pairs, options.workers))
        row = rows[-1]
        print(
            f"{task:20} reads {row['read_gb']:.2f} GB, writes {row['written_gb']:.2f} GB  "
            f"cp {row['cp_s']:6.2f} s (cpu {row['cp_cpu_s']:5.2f})  ours {row['ours_s']:6.2f} s "
            f"(cpu {row['ours_cpu_s']:6.2f})  {row['speed_over_cp']:5.2f} x cp  +{row['memory_mb']:4.0f} MB",
            flush=True,
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")
    if options.into:
        convert.put_into(options.into, "four-bits", convert.caption(about) + table(rows))


if __name__ == "__main__":
    main()
