"""FP8 on a GPU, measured: is it true, does a switch of precision show, how fast is it.

    python benchmarks/gpu.py [--out benchmarks/results/gpu.json] [--sections truth,speed,...] [--small]
    python benchmarks/gpu.py --merge a.json b.json --out benchmarks/results/gpu.json
    python benchmarks/gpu.py --table benchmarks/results/gpu.json [--into docs/benchmarks.md]

Each section is a process of its own with a budget of seconds, and reports row by row: the result has each row within a
second, and of a section that fails or runs out of time those that it had, and its failure. What measures no time comes
first, all at once; then the others have the GPU to themselves. A call ends before its limit, of six minutes if nothing
else is said: a section for which no time is left is told, and wants a call of its own.
`make gpu` makes all of them, in four calls, `gpu-1` to `gpu-4`, so that two calls fit a machine that is lent for a
quarter of an hour. `--small` runs the same code on a CPU, emulated, in a few minutes: its numbers say nothing. Without
a GPU and without `--small` nothing is measured. The tables are printed, or put between the two marks `gpu` of a
document.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from threading import Lock
from typing import Any

from convert import put_into

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = {
    "tests": 220,
    "truth": 100,
    "curves": 220,
    "profile": 110,
    "speed": 200,
    "core": 90,
    "products": 80,
    "serving": 200,
    "peers": 190,
    "casts": 150,
}
"""Seconds, in the order in which they run: what counts most comes first."""

UNTIMED = ("tests", "truth", "curves")
"""Sections that measure no time, so run side by side on one GPU."""

LIMIT = 345
"""Seconds of a call, six minutes but for what comes before it, such as unpacking Transformer Engine."""

SAME = ("small", "gpu", "torch", "transformer_engine", "python")
"""What results must share to be merged."""


def run_section(name: str, small: bool, seconds: float, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The rows of a section, and how it ended. While it runs, `keep` gets what there is whenever rows have come."""
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder) / "rows.jsonl", Path(folder) / "log"

        def found(ended: str) -> dict[str, Any]:
            made = rows.read_text().split("\n")[:-1] if rows.exists() else []  # what follows the last is being written
            tail = log.read_text(errors="replace")[-4000:] if ended != "complete" else ""
            taken = round(time.time() - start, 1)
            return {"ended": ended, "seconds": taken, "rows": [json.loads(row) for row in made], "log": tail}

        command = [sys.executable, __file__, "--section", name, "--rows", str(rows), *(["--small"] if small else [])]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        with open(log, "wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            kept = 0
            while process.poll() is None and time.time() < start + seconds:
                so_far = found("cut off with the whole call")
                if len(so_far["rows"]) > kept:
                    keep(so_far)
                    kept = len(so_far["rows"])
                with suppress(subprocess.TimeoutExpired):
                    process.wait(min(1, seconds))
            if process.returncode is None:
                return found(f"stopped after its {seconds:g} seconds")
            return found("complete" if process.returncode == 0 else f"failed with exit code {process.returncode}")
        finally:
            process.kill()
            process.wait()


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
    for package in ("triton", "transformer_engine", "transformer_engine_torch", "torchao", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found |= {"torch": torch.__version__, "cpus": os.cpu_count()}
    if torch.cuda.is_available():
        with suppress(ImportError, RuntimeError, OSError):
            from transformer_engine.pytorch.utils import get_cudnn_version  # before PyTorch loads its own

            found["cudnn_of_te"] = ".".join(map(str, get_cudnn_version()))
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        found["nvidia_smi"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
        found["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return found


def measure(sections: Sequence[str], out: Path, small: bool, limit: float) -> dict[str, Any]:
    """Run each for its budget at most; the result so far is written whenever rows have come."""
    end = time.time() + limit
    result: dict[str, Any] = {"machine": machine(small), "sections": {}}
    out.parent.mkdir(parents=True, exist_ok=True)
    writing = Lock()

    def keep(name: str, section: dict[str, Any]) -> None:
        with writing:
            result["sections"][name] = section
            beside = out.with_name(f"{out.name}.part")  # a call may be ended at any time
            beside.write_text(json.dumps(result, indent=1) + "\n")
            beside.replace(out)

    def run(name: str) -> None:
        left = end - time.time()
        if left < min(30, BUDGETS[name]):
            section: dict[str, Any] = {"ended": "not begun: no time was left", "seconds": 0, "rows": [], "log": ""}
        else:
            section = run_section(name, small, min(BUDGETS[name], left), partial(keep, name))
        keep(name, section)
        told = f"{name}: {section['ended']} in {section['seconds']} s, {len(section['rows'])} rows\n{section['log']}"
        print(told, end="", flush=True)

    together = [name for name in sections if name in UNTIMED]
    with ThreadPoolExecutor(len(UNTIMED)) as threads:
        list(threads.map(run, together))
    for name in sections:
        if name not in together:
            run(name)
    return result


def merged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The sections of several calls; of one that ran twice, the later one, unless it got no further. Raises SystemExit
    for results of different machines."""
    machine = results[0]["machine"]
    sections: dict[str, Any] = {}
    for result in results:
        for key in SAME:
            if result["machine"].get(key) != machine.get(key):
                raise SystemExit(f"not to be merged: {key} is {machine.get(key)} and {result['machine'].get(key)}")
        for name, section in result["sections"].items():
            before = sections.get(name)
            if before is None or section["ended"] == "complete" or len(section["rows"]) > len(before["rows"]):
                sections[name] = section
    return {"machine": machine, "sections": {name: sections[name] for name in BUDGETS if name in sections}}


def main() -> int:
    start = time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu.json"))
    parser.add_argument("--sections", default=",".join(BUDGETS))
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of the whole call")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--merge", type=Path, nargs="+", help="make one result of several and measure nothing")
    parser.add_argument("--table", type=Path, help="print the tables of a result and measure nothing")
    parser.add_argument("--into", type=Path, help="the document that the tables are put into")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section:
        measure_section(options.section, options.rows, options.small)
        return 0
    if options.merge:
        result = merged([json.loads(path.read_text()) for path in options.merge])
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        return 0
    from gpu_sections.table import tables

    if options.table:
        table = tables(json.loads(options.table.read_text()))
        put_into(options.into, "gpu", table) if options.into else print(table)
        return 0
    import torch

    if not (options.small or torch.cuda.is_available()):
        print("No GPU here: nothing was measured. `--small` runs all of it on a CPU, emulated.")
        return 0
    left = options.limit - (time.time() - start)  # importing PyTorch takes seconds on a machine that is new
    result = measure(options.sections.split(","), options.out, options.small, left)
    print(tables(result))
    return 0 if all(section["ended"] == "complete" for section in result["sections"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
