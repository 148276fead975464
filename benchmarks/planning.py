"""What plans of the largest open models take, and how ranks would share their files: sparse directories, as large as
the models and without their numbers, of which no tensor is read.

    python benchmarks/planning.py [--out benchmarks/results/planning.json] [--into docs/benchmarks.md]

CPU seconds of `plan_command`, and the most memory above what importing the program takes, each in a fresh process,
beside what `--dry-run` says. Of ranks: the files and bytes of each, and the most bytes over the mean.
"""

import argparse
import json
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from convert import put_into

CONFIGS = Path(__file__).parents[1] / "tests" / "golden" / "published_configs.jsonl"

MODELS = (
    ("deepseek-ai/DeepSeek-V3", 16),
    ("deepseek-ai/DeepSeek-V3", 31),
    ("deepseek-ai/DeepSeek-V3", 61),
    ("moonshotai/Kimi-K2-Instruct", 61),
)
"""Repository and number of layers."""

MEGATRON = ("torch_dist", "torch")
"""Megatron's containers, as sources of each number of DeepSeek-V3's layers."""

EXPORTS = ("block", "nvfp4a16")
"""Schemes in which the last of MODELS is exported for vLLM, from BF16."""

RANKS = (8, 64, 256)


def make_sparse(directory: Path, repository: str, layers: int, *, codes: bool) -> int:
    """A model with its config's names, shapes and dtypes: BF16, or as published, FP8 in blocks of 128 x 128. Returns
    the number of tensors."""
    from precisionctl.architectures.families import from_hf_config, table_of
    from precisionctl.architectures.param_map import names
    from precisionctl.checkpoints.base import Companions
    from precisionctl.checkpoints.huggingface import HuggingFaceWriter
    from precisionctl.codes.encoding import grid_shape
    from precisionctl.dtypes import DType
    from precisionctl.param import TensorSpec

    published = [json.loads(line) for line in CONFIGS.read_text().splitlines()]
    (config,) = (each["config"] for each in published if each["repository"] == repository)
    config["num_hidden_layers"] = layers
    quantization = config.pop("quantization_config")
    model = from_hf_config(config)
    specs = {}
    for row in table_of(model).spelled({}, model):
        if not row.present.in_layout("hf", model):
            continue
        shapes = row.shapes(model, "hf")
        for place in row.places(model):
            for name, shape in zip(names(row, "hf", place), shapes, strict=True):
                coded = codes and row.gemm
                specs[name] = TensorSpec(shape, DType.float8_e4m3fn if coded else DType.bfloat16)
                if coded:
                    specs[f"{name}_scale_inv"] = TensorSpec(grid_shape(shape[0], shape[1], (128, 128)), DType.float32)
    directory.mkdir()
    writer = HuggingFaceWriter(directory, specs, Companions(), config, quantization if codes else None)
    writer.lay_out()
    writer.finish(None)
    return len(specs)


def make_sparse_in_megatron(source: Path, destination: Path, container: str) -> None:
    """The same model in a container of Megatron: what a conversion writes but for the numbers."""
    from precisionctl.commands.plan_command import plan_command
    from precisionctl.commands.request import Request
    from precisionctl.conversion import command
    from precisionctl.conversion.outcome import Outcome

    def lay_out(plan: object, source: object, writer: Any, **_: object) -> Outcome:
        writer.lay_out()
        return Outcome()

    request = Request(source, destination, "megatron", container=container)
    with mock.patch.multiple(command, convert=lay_out, check_room=lambda command: None):
        command.execute(plan_command(request))
    for index in destination.glob("*/.metadata"):  # as Megatron pickles it, with a memo of everything
        index.write_bytes(pickle.dumps(pickle.loads(index.read_bytes())))


def child(source: Path, target: str) -> dict[str, Any]:
    """One plan in this process, and the shares of ranks by it."""
    from precisionctl.commands.plan_command import plan_command
    from precisionctl.commands.request import Request
    from precisionctl.conversion.convert import parts_of_ranks
    from precisionctl.conversion.estimate import PLANNED

    Path("/proc/self/clear_refs").write_text("5")  # forget the peak that importing left
    before, start = memory_mb("VmRSS"), time.process_time()
    destination = source.with_name("none")
    if target in EXPORTS:
        request = Request.export(source, destination, "vllm", target)  # type: ignore[arg-type]
    else:
        request = Request(source, destination, "hf" if target == "hf" else "megatron")
    command = plan_command(request)
    seconds, memory = time.process_time() - start, memory_mb("VmHWM") - before
    said = PLANNED * (len(command.reader.specs) + len(command.plan.targets)) / 1e6
    shares = {}
    for count in RANKS:
        start = time.process_time()
        parts = parts_of_ranks(command.plan, command.writer, count)
        sizes = [sum(map(len, part.values())) for part in parts]
        files = [file for part in parts for file in part]
        shares[count] = {
            "most_files": max(map(len, parts)),
            "cut_files": len(files) - len(set(files)),
            "mean_gb": statistics.mean(sizes) / 1e9,
            "most_over_mean": max(sizes) / statistics.mean(sizes),
            "cpu_s": time.process_time() - start,
        }
    return {"target": target, "cpu_s": seconds, "memory_mb": memory, "said_mb": said, "ranks": shares}


def memory_mb(field: str) -> float:
    """A line of Linux's account of this process: VmRSS is what it holds, VmHWM the most that it held."""
    status = Path("/proc/self/status").read_text()
    return float(status.split(f"{field}:")[1].split()[0]) / 1024


def measure(scratch: Path) -> list[dict[str, Any]]:
    rows = []
    for repository, layers in MODELS:
        for codes in (False, True):
            source = scratch / f"{repository.rpartition('/')[2]}-{layers}-{'fp8' if codes else 'bf16'}"
            tensors = make_sparse(source, repository, layers, codes=codes)
            exports = EXPORTS if (repository, layers) == MODELS[-1] and not codes else ()
            rows += [planned(source, target, tensors) for target in ("torch_dist", "hf", *exports)]
            if codes or repository != MODELS[0][0]:
                continue
            for container in MEGATRON:
                megatron = scratch / f"{repository.rpartition('/')[2]}-{layers}-{container}"
                make_sparse_in_megatron(source, megatron, container)
                rows.append(planned(megatron, "hf", tensors))
    return rows


def planned(source: Path, target: str, tensors: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", str(source), target]
    made = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    row = {"model": source.name, "tensors": tensors, **json.loads(made)}
    print(line(row), flush=True)
    return row


def line(row: dict[str, Any]) -> str:
    shares = "  ".join(f"{count}: {share['most_over_mean']:.2f}" for count, share in row["ranks"].items())
    return (
        f"{row['model']:26} {row['tensors']:7,} tensors to {row['target']:10} {row['cpu_s']:5.2f} s of CPU "
        f"{row['memory_mb']:4.0f} MB, said {row['said_mb']:4.0f} MB; most bytes of a rank over the mean, of {shares}"
    )


def plans_table(rows: list[dict[str, Any]]) -> str:
    """Of plans for `torch_dist`, of those from Megatron for Hugging Face, and of exports."""
    lines = ["| model | stored tensors | CPU | memory | predicted |", "|---|---|---|---|---|"]
    for row in rows:
        exported = f", exported as `{row['target']}`" if row["target"] in EXPORTS else ""
        if row["target"] == "torch_dist" or row["model"].endswith(MEGATRON) or exported:
            lines.append(
                f"| {in_words(row)}{exported} | {row['tensors']:,} | {row['cpu_s']:.2f} s | "
                f"{row['memory_mb']:.0f} MB | {row['said_mb']:.0f} MB |"
            )
    return "\n".join(lines)


def ranks_table(rows: list[dict[str, Any]]) -> str:
    """Of whole models in BF16: the most bytes of a rank over the mean."""
    lines = [
        f"| target | {' | '.join(f'{count} ranks' for count in RANKS)} |",
        "|---" * (1 + len(RANKS)) + "|",
    ]
    for row in rows:
        if row["model"].endswith("-61-bf16") and row["target"] not in EXPORTS:
            target = "Hugging Face" if row["target"] == "hf" else f"`{row['target']}`"
            shares = " | ".join(f"{row['ranks'][str(count)]['most_over_mean']:.2f}" for count in RANKS)
            lines.append(f"| {in_words(row)}, {target} | {shares} |")
    return "\n".join(lines)


def in_words(row: dict[str, Any]) -> str:
    model, layers, what = row["model"].rsplit("-", 2)
    said = {"bf16": "BF16", "fp8": "FP8 as published"}.get(what, f"BF16 in `{what}`")
    return f"{model.removesuffix('-Instruct')}, {layers} layers, {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/planning.json"))
    parser.add_argument("--into", type=Path, help="a page with tables between marks `planning` and `ranks`")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(Path(options.child[0]), options.child[1])))
        return
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(Path(scratch))
    options.out.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "rows": rows}, indent=2) + "\n")
    if options.into:
        put_into(options.into, "planning", plans_table(rows))
        put_into(options.into, "ranks", ranks_table(rows))


if __name__ == "__main__":
    main()
