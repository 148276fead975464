"""Conversion and export against a file copy of the same bytes: ratios from one run, and memory at two sizes.

    python benchmarks/convert.py [--gigabytes 2.4] [--pairs 7] [--out benchmarks/results/convert.json]
        [--into docs/benchmarks.md]

Three sizes of a model, the largest in full; rows are printed, and saved with a plot of time and memory beside them;
`--into` puts the table into the page. Each pair copies the source with `cp -r --reflink=never` and `sync`, then runs
ours with its own sync, in a fresh process; its start-up and imports are counted apart. The source is in the page cache
for both. Both are made twice, and the second counts, which writes into memory that the first has just freed: a virtual
machine may have given other free memory back to its host, and whoever takes it again pays, 5 s instead of 0.6 s for 2
GB, here, at random.
"""

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

TASKS = (
    "hf to torch_dist",
    "torch_dist to hf",
    "hf to torch",
    "torch to hf",
    "hf to torch_dist, TP 8 PP 4",
    "hf to torch, TP 8 PP 4",
    "torch to hf, TP 8 PP 4",
    "hf to export static",
    "hf to export dynamic",
    "hf to export block",
    "export block to torch_dist",
    "export block to export block",
)
"""From what to what; and at the largest size what is cut for 8 x 4 ranks, and codes that are decoded and passed on."""

IN_PLOT = ("hf to torch_dist", "torch_dist to hf", "hf to torch", "hf to export static")


def make_model(directory: Path, gigabytes: float) -> None:
    """A Llama of about that size."""
    layer_bytes = 2 * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 5632 * 2048)
    layers = 4 * max(1, round((gigabytes * 1e9 - 2 * 2 * 32000 * 2048) / layer_bytes / 4))
    write_model(directory, 2048, 5632, layers, 32000)


def write_model(directory: Path, width: int, ffn: int, layers: int, vocabulary: int) -> None:
    """A Llama with random BF16 weights and recorded FP8 state, written shard by shard."""
    import torch

    from precisionctl.architectures.families import architecture_of, from_hf_config
    from precisionctl.architectures.param_map import names
    from precisionctl.checkpoints.base import Companions
    from precisionctl.checkpoints.chunks import write_rows
    from precisionctl.checkpoints.huggingface import HuggingFaceReader, HuggingFaceWriter
    from precisionctl.conversion.weights_digest import digest_weights
    from precisionctl.dtypes import DType
    from precisionctl.fp8 import sidecar
    from precisionctl.param import TensorSpec

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    model = from_hf_config(config)
    specs = {}
    for row in architecture_of("llama").spelled({}, model):
        if row.present.in_layout("hf", model):
            for place in row.places(model):
                for name, shape in zip(names(row, "hf", place), row.shapes(model, "hf"), strict=True):
                    specs[name] = TensorSpec(shape, DType.bfloat16)
    directory.mkdir(parents=True)
    writer = HuggingFaceWriter(directory, specs, Companions(), config, max_shard_size=1_000_000_000)
    writer.lay_out()
    generator = torch.Generator().manual_seed(0)
    for name, spec in specs.items():
        values = torch.randn(spec.rows, spec.columns, generator=generator, dtype=torch.float32).mul_(0.02)
        write_rows(writer, name, 0, values.bfloat16())
    writer.finish(None)
    state = replace(recorded_state(model), of_weights=digest_weights(HuggingFaceReader(directory)))
    sidecar.write(directory / sidecar.RELATIVE, state)


def recorded_state(model: Any) -> Any:
    """FP8 state as after training, so that a static export has input scales, but for the digest of the weights."""
    import torch

    from precisionctl.architectures.families import architecture_of
    from precisionctl.architectures.param_map import names
    from precisionctl.fp8.delayed_scaling import after_one_update
    from precisionctl.fp8.state import ROLES, DelayedScaling, Fp8State, Fp8States

    recipe = DelayedScaling(amax_history_len=16)
    state = Fp8State({role: after_one_update(torch.tensor(3.0), role, recipe) for role in ROLES})
    rows = [row for row in architecture_of("llama").spelled({}, model) if row.gemm]
    gemms = [names(row, "megatron", place)[0].rpartition(".")[0] for row in rows for place in row.places(model)]
    return Fp8States(recipe, dict.fromkeys(gemms, state), producer="benchmark", iteration=1)


def child(task: str, source: Path, target: Path, workers: int, started: float) -> None:
    """One run in this process, which was started at a time; prints seconds, those of the kernel among them, and memory
    above what importing took, its workers' included."""
    import torch  # noqa: F401  # as FP8 state needs it: start-up, which `plan` would otherwise pay for, like the next

    import precisionctl.commands.plan_command  # noqa: F401
    from precisionctl.conversion.command import execute

    shutil.rmtree(target, ignore_errors=True)
    plan(task, source, target)  # which imports what is left
    startup = time.time() - started
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak that importing left
    before = memory_mb("VmRSS")
    of_workers = WorkersMemory()
    for _ in range(2):
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["sync"], check=True)  # or the disk would be told of free blocks in the middle of the run
        start, user, kernel = time.perf_counter(), *cpu_seconds()
        work = plan(task, source, target)
        planned = time.perf_counter() - start
        execute(work, workers=workers)
        seconds, spent = time.perf_counter() - start, cpu_seconds()
    memory = memory_mb("VmHWM") - before + of_workers.stop()
    of_kernel = spent[1] - kernel
    measured = {"seconds": seconds, "cpu": spent[0] - user + of_kernel, "kernel": of_kernel}
    print(json.dumps(measured | {"startup": startup - planned, "memory_mb": memory}))


def cpu_seconds() -> tuple[float, float]:
    """What this process and its children have used: of their own, and of the kernel."""
    user, kernel, of_children, kernel_of_children, _ = os.times()
    return user + of_children, kernel + kernel_of_children


class WorkersMemory(threading.Thread):
    """The most that the workers hold together of their own, in MB: pages that they share with nobody, looked at now
    and then."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._most, self._ended = 0.0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.2):
            self._most = max(self._most, sum(private_mb(process.pid) for process in multiprocessing.active_children()))

    def stop(self) -> float:
        self._ended.set()
        self.join()
        return self._most


def private_mb(process: int | None) -> float:
    try:
        pages = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:  # it has just ended
        return 0.0
    return sum(float(line.split()[1]) for line in pages.splitlines() if line.startswith("Private_Dirty")) / 1024


def plan(task: str, source: Path, target: Path) -> Any:
    from precisionctl.commands.plan_command import plan_command
    from precisionctl.commands.request import Request
    from precisionctl.param import Parallelism

    made, _, cut = task.partition(" to ")[2].partition(", ")
    if made.startswith("export"):
        scheme: Any = made.removeprefix("export ")
        return plan_command(Request.export(source, target, "vllm", scheme))
    if made == "hf":
        return plan_command(Request(source, target, "hf"))
    sizes = Parallelism(8, 4) if cut else Parallelism()
    conversion = Request(source, target, "megatron", container=made, parallelism=sizes)
    return plan_command(conversion)


def total_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def memory_mb(field: str) -> float:
    """A line of Linux's account of this process: VmRSS is what it holds, VmHWM the most that it held."""
    status = Path("/proc/self/status").read_text()
    return float(status.split(f"{field}:")[1].split()[0]) / 1024


def run_child(task: str, source: Path, target: Path, workers: int) -> dict[str, float]:
    subprocess.run(["sync"], check=True)
    command = [sys.executable, __file__, "--child", task, str(source), str(target), "--workers", str(workers)]
    command += ["--started", str(time.time())]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, float] = json.loads(result.stdout)
    return measured


def copy_seconds(source: Path, target: Path) -> tuple[float, float]:
    """Of a copy until it is on the disk, and of the kernel for `cp` itself."""
    for _ in range(2):
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["sync"], check=True)
        start, (_, before) = time.perf_counter(), cpu_seconds()
        subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
        kernel = cpu_seconds()[1] - before
        subprocess.run(["sync"], check=True)
        seconds = time.perf_counter() - start
    return seconds, kernel


def measure(task: str, source: Path, scratch: Path, pairs: int, workers: int) -> dict[str, Any]:
    ours, copies = [], []
    for _ in range(pairs):
        copies.append(copy_seconds(source, scratch / "copy"))
        ours.append(run_child(task, source, scratch / "ours", workers))
    shutil.rmtree(scratch / "copy")
    size = total_bytes(source)
    seconds = statistics.median(run["seconds"] for run in ours)
    copy = statistics.median(seconds for seconds, _ in copies)
    ratios = [c / run["seconds"] for (c, _), run in zip(copies, ours, strict=True)]
    return {
        "task": task,
        "source_gb": size / 1e9,
        "cp_s": copy,
        "ours_s": seconds,
        "speed_over_cp": statistics.median(ratios),
        "spread_over_cp": [min(ratios), max(ratios)],
        "startup_s": statistics.median(run["startup"] for run in ours),
        "cpu_s": statistics.median(run["cpu"] for run in ours),
        "kernel_s": statistics.median(run["kernel"] for run in ours),
        "cp_kernel_s": statistics.median(kernel for _, kernel in copies),
        "memory_mb": max(run["memory_mb"] for run in ours),
        "spread_ours_s": [min(run["seconds"] for run in ours), max(run["seconds"] for run in ours)],
        "spread_cp_s": [min(copies)[0], max(copies)[0]],
    }


def benchmark(sizes: Mapping[float, int], workers: int, scratch: Path) -> list[dict[str, Any]]:
    """Every task at each size in gigabytes, so many times; what one task made of the model, another one starts from."""
    rows = []
    for size, pairs in sizes.items():
        made = {"hf": scratch / "hf"}
        make_model(made["hf"], size)
        for task in TASKS if size == max(sizes) else IN_PLOT:
            source, _, target = task.partition(" to ")
            if task.startswith("torch") and task.endswith("TP 8 PP 4"):
                source += ", TP 8 PP 4"
            rows.append(measure(task, made.get(source, made["hf"]), scratch, pairs, workers))
            print(line(rows[-1]), flush=True)
            if source == "hf":
                made[target] = scratch / target.replace(" ", "")
                (scratch / "ours").rename(made[target])
        for directory in made.values():
            shutil.rmtree(directory)
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Seconds, ours and cp's, and memory against the size of the model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    seconds, memory = figure.subplots(1, 2)
    for task in IN_PLOT:
        points = sorted((row["source_gb"], row["ours_s"], row["memory_mb"]) for row in rows if row["task"] == task)
        sizes, times, megabytes = zip(*points, strict=True)
        seconds.plot(sizes, times, marker="o", label=task)
        memory.plot(sizes, megabytes, marker="o", label=task)
    copies = sorted((row["source_gb"], row["cp_s"]) for row in rows if row["task"] == IN_PLOT[0])
    seconds.plot(*zip(*copies, strict=True), color="black", linestyle="--", marker="o", label="cp and sync")
    seconds.set(xlabel="model in GB", ylabel="seconds", ylim=(0, None), title="Time, sync included")
    memory.set(xlabel="model in GB", ylabel="MB", ylim=(0, 512), title="Memory above importing, all workers")
    seconds.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['task']:28} {row['source_gb']:5.2f} GB  cp {row['cp_s']:6.2f} s  ours {row['ours_s']:6.2f} s  "
        f"{row['speed_over_cp']:5.2f} x cp  cpu {row['cpu_s']:6.2f} s  +{row['memory_mb']:4.0f} MB"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The rows of the largest size, and the memory of one a quarter of it."""
    smallest, *_, largest = sorted(row["source_gb"] for row in rows if row["task"] == TASKS[0])
    small = {row["task"]: row["memory_mb"] for row in reversed(rows)}
    lines = [
        f"| task | `cp` and `sync` | ours | speed over `cp` | whole process | kernel: `cp`, ours | memory, "
        f"{smallest:.2f} GB | memory, {largest:.2f} GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows[-len(TASKS) :]:
        low, high = row["spread_over_cp"]
        memory = f"{small[row['task']]:.0f} MB" if row["task"] in IN_PLOT else "-"
        lines.append(
            f"| {row['task']} | {row['cp_s']:.2f} s | {row['ours_s']:.2f} s | {row['speed_over_cp']:.2f} "
            f"({low:.2f} to {high:.2f}) | {row['startup_s'] + row['ours_s']:.2f} s | {row['cp_kernel_s']:.2f} s, "
            f"{row['kernel_s']:.2f} s | {memory} | {row['memory_mb']:.0f} MB |"
        )
    return "\n".join(lines)


def put_into(page: Path, mark: str, made: str) -> None:
    """Replace what is between two marks of a page. Raises SystemExit where it has none."""
    before, begin, rest = page.read_text().partition(f"<!-- {mark} -->\n")
    _, end, after = rest.partition(f"<!-- /{mark} -->")
    if not begin or not end:
        raise SystemExit(f"{page} has no place for the tables: <!-- {mark} --> and <!-- /{mark} -->")
    page.write_text(f"{before}{begin}{made}\n{end}{after}")


def circumstances(pairs: int, workers: int) -> dict[str, Any]:
    """When and where a benchmark begins."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "pairs": pairs,
        "workers": workers,
    }


def caption(about: Mapping[str, Any]) -> str:
    return (
        f"On {about['date']}, medians of {about['pairs']} pairs, {about['workers']} workers, on {about['cpus']} cores "
        f"with a load of {about['load']:.1f} at the beginning:\n\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.4)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scratch", type=Path, help="directory on the disk to measure; else the temporary one")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/convert.json"))
    parser.add_argument("--into", type=Path, help="a page with a table between `<!-- convert -->` marks")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        task, source, target = options.child
        child(task, Path(source), Path(target), options.workers, options.started)
        return
    about = circumstances(options.pairs, options.workers)
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        sizes = {options.gigabytes / 4: 1, options.gigabytes / 2: 1, options.gigabytes: options.pairs}
        rows = benchmark(sizes, options.workers, Path(scratch))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    plot(rows, options.out.with_suffix(".png"))
    options.out.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")
    if options.into:
        put_into(options.into, "convert", caption(about) + table(rows))


if __name__ == "__main__":
    main()
