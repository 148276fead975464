"""FP8 on a GPU, measured: is it true, does a switch of precision show, how fast is it.

    python benchmarks/gpu.py [--out benchmarks/results/gpu.json] [--sections truth,curves,speed,products] [--small]

Each section is a process of its own with a budget of seconds, and reports row by row: one that fails or runs out of
time leaves the rows that it had, and its failure, in the result. All budgets together are seven minutes and a quarter.
`--small` runs the same code on a CPU, emulated, in two minutes: its numbers say nothing. Without a GPU and without
`--small` nothing is measured. The tables are printed, for docs/benchmarks.md.
"""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

BUDGETS = {"truth": 60, "speed": 185, "curves": 150, "products": 40}
"""Seconds, in the order in which they run."""


def run_section(name: str, small: bool) -> dict[str, Any]:
    """The rows of a section, and how it ended."""
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder) / "rows.jsonl", Path(folder) / "log"
        command = [sys.executable, __file__, "--section", name, "--rows", str(rows), *(["--small"] if small else [])]
        with open(log, "wb") as output:
            try:
                code = subprocess.run(command, stdout=output, stderr=output, timeout=BUDGETS[name]).returncode
                ended = "complete" if code == 0 else f"failed with exit code {code}"
            except subprocess.TimeoutExpired:
                ended = f"stopped after its {BUDGETS[name]} seconds"
        made = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
        tail = log.read_text(errors="replace")[-2000:] if ended != "complete" else ""
    return {"ended": ended, "seconds": round(time.time() - start, 1), "rows": made, "log": tail}


def measure_section(name: str, rows: Path, small: bool) -> None:
    """In the section's own process."""
    from gpu_sections.common import Place

    def report(row: dict[str, Any]) -> None:
        with open(rows, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    importlib.import_module(f"gpu_sections.{name}").measure(Place(small), report)


def machine(small: bool) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "small": small, "python": platform.python_version()}
    for package in ("torch", "triton", "transformer_engine", "transformer_engine_torch"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found |= {"torch": torch.__version__, "cpus": os.cpu_count()}
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        found["nvidia_smi"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu.json"))
    parser.add_argument("--sections", default=",".join(BUDGETS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--table", type=Path, help="print the tables of a result and measure nothing")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section:
        measure_section(options.section, options.rows, options.small)
        return 0
    from gpu_sections.table import tables

    if options.table:
        print(tables(json.loads(options.table.read_text())))
        return 0
    import torch

    if not (options.small or torch.cuda.is_available()):
        print("No GPU here: nothing was measured. `--small` runs all of it on a CPU, emulated.")
        return 0
    result: dict[str, Any] = {"machine": machine(options.small), "sections": {}}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name in options.sections.split(","):
        result["sections"][name] = section = run_section(name, options.small)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{name}: {section['ended']} in {section['seconds']} s, {len(section['rows'])} rows", flush=True)
        print(section["log"], end="", flush=True)
    print(tables(result))
    failed = any(section["ended"] != "complete" for section in result["sections"].values())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
