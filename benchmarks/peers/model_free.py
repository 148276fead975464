"""Export of FP8 weights against llm-compressor's `model_free_ptq` on the same model: pairs of runs, time and memory.

    python benchmarks/peers/model_free.py --python .peers/llmcompressor/bin/python [--gigabytes 2.4] [--pairs 3]

Both make a scale for each output channel and leave inputs to the engine (its preset FP8_DYNAMIC), of the same BF16
Llama in the page cache, with as many workers, each in a fresh process whose imports are not counted, until the result
is on the disk: ours syncs what it writes, the other one is followed by a sync, whose seconds are told apart too. Each
is made twice, and the second counts (convert.py says why).
With `--whole TYPE` the model says that it is of a type without a table here (any name that none has), each process
runs once and is measured from start to end, imports included: seconds, CPU seconds, which other programs hardly
change, and the memory of its largest process.
`--python` is that of an environment with llm-compressor (`make peers` makes one).
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))


def child(source: str, target: str, workers: int) -> None:
    """One run of llm-compressor's; prints seconds and memory above what importing took."""
    import convert
    from llmcompressor import model_free_ptq

    Path("/proc/self/clear_refs").write_text("5")  # forget the peak that importing left
    before = convert.memory_mb("VmRSS")
    for _ in range(2):
        shutil.rmtree(target, ignore_errors=True)
        start = time.perf_counter()
        model_free_ptq(source, target, scheme="FP8_DYNAMIC", ignore=["lm_head"], max_workers=workers, device="cpu")
        written = time.perf_counter() - start
        os.sync()
        seconds = time.perf_counter() - start
    memory = convert.memory_mb("VmHWM") - before
    print("\n" + json.dumps({"seconds": seconds, "before_sync": written, "memory_mb": memory}))


def run_theirs(python: Path, source: Path, target: Path, workers: int) -> dict[str, float]:
    subprocess.run(["sync"], check=True)
    command = [str(each) for each in (python, __file__, "--child", source, target, "--workers", workers)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    measured: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return measured


def measure(python: Path, gigabytes: float, pairs: int, workers: int, scratch: Path) -> dict[str, Any]:
    import convert

    source = scratch / "hf"
    convert.make_model(source, gigabytes)
    shutil.rmtree(source / "precisionctl")  # FP8 state, which neither needs: llm-compressor takes it for weights
    theirs, ours, load = [], [], []
    for _ in range(pairs):
        load.append(os.getloadavg()[0])
        theirs.append(run_theirs(python, source, scratch / "theirs", workers))
        ours.append(convert.run_child("hf to export dynamic", source, scratch / "ours", workers))
        print(f"theirs {theirs[-1]}\nours   {ours[-1]}\nload   {load[-1]:.1f}", flush=True)
    pairwise = [their["seconds"] / our["seconds"] for their, our in zip(theirs, ours, strict=True)]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gigabytes": convert.total_bytes(source) / 1e9,
        "workers": workers,
        "cpus": os.cpu_count(),
        "theirs_s": [run["seconds"] for run in theirs],
        "theirs_before_sync_s": [run["before_sync"] for run in theirs],
        "ours_s": [run["seconds"] for run in ours],
        "speed_over_theirs": statistics.median(pairwise),
        "each_pair": pairwise,
        "theirs_mb": max(run["memory_mb"] for run in theirs),
        "ours_mb": max(run["memory_mb"] for run in ours),
        "load_before_each_pair": load,
    }


def whole(command: list[Any], **environment: str) -> dict[str, float]:
    """A process from start to end."""
    subprocess.run(["sync"], check=True)
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=inherited | environment
    )
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command} failed")
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "cpu_s": used.ru_utime + used.ru_stime, "memory_mb": used.ru_maxrss / 1024}


def measure_whole(
    python: Path, model_type: str, gigabytes: float, pairs: int, workers: int, scratch: Path
) -> dict[str, Any]:
    source, target = scratch / "hf", scratch / "out"
    make = f"import convert, pathlib; convert.make_model(pathlib.Path({str(source)!r}), {gigabytes})"
    subprocess.run([sys.executable, "-c", make], check=True, cwd=ROOT / "benchmarks")  # a child's peak begins with ours
    shutil.rmtree(source / "precisionctl")
    config = json.loads((source / "config.json").read_text()) | {"model_type": model_type}
    (source / "config.json").write_text(json.dumps(config))
    how = f"scheme='FP8_DYNAMIC', ignore=['lm_head'], max_workers={workers}, device='cpu'"
    program = f"from llmcompressor import model_free_ptq; model_free_ptq({str(source)!r}, {str(target)!r}, {how})"
    export = [sys.executable, "-m", "precisionctl", "export-inference", source, target, "--target", "vllm"]
    export += ["--scheme", "dynamic", "--workers", str(workers)]
    commands = {"theirs": ([python, "-c", program], {}), "ours": (export, {"PYTHONPATH": str(ROOT)})}
    found: dict[str, Any] = {"model_type": model_type, "theirs": [], "ours": [], "load": []}
    for _ in range(pairs):
        found["load"].append(os.getloadavg()[0])
        for side, (command, environment) in commands.items():
            shutil.rmtree(target, ignore_errors=True)
            found[side].append(whole(command, **environment))
            print(side, found[side][-1], f"load {found['load'][-1]:.1f}", flush=True)
    return found | {
        "gigabytes": sum(file.stat().st_size for file in source.glob("*.safetensors")) / 1e9,
        "workers": workers,
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=Path(".peers/llmcompressor/bin/python"))
    parser.add_argument("--whole", metavar="TYPE", help="whole processes, of a model of this type")
    parser.add_argument("--gigabytes", type=float, default=2.4)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scratch", type=Path, help="directory on the disk to measure; else the temporary one")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/model_free.json"))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        source, target = options.child
        child(source, target, options.workers)
        return
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        sizes = options.gigabytes, options.pairs, options.workers, Path(scratch)
        if options.whole:
            found = measure_whole(options.python.absolute(), options.whole, *sizes)
            options.out.write_text(json.dumps(found, indent=2))
            return
        found = measure(options.python.absolute(), *sizes)
    options.out.write_text(json.dumps(found, indent=2))
    print(
        f"{found['speed_over_theirs']:.1f} x model_free_ptq, {found['ours_mb']:.0f} MB and {found['theirs_mb']:.0f} MB"
    )


if __name__ == "__main__":
    main()
