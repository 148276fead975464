"""What plans take: memory as a dry run says, and work that grows as the number of tensors does."""

import json
import shutil
import sys
import tracemalloc
from pathlib import Path
from types import FrameType, SimpleNamespace

import pico
import pytest
import repository
import torch
from soaking import in_soak

from precisionctl.architectures.families import from_hf_config, table_of
from precisionctl.architectures.param_map import names
from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.huggingface import HuggingFaceWriter
from precisionctl.codes import nibbles
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.buffers import Buffers, worker_memory
from precisionctl.conversion.command import PlannedCommand, check_room
from precisionctl.conversion.estimate import estimate
from precisionctl.dtypes import DType
from precisionctl.errors import DiskProblem
from precisionctl.param import ONE_RANK, Parallelism, TensorSpec

PUBLISHED = [json.loads(line) for line in (repository.GOLDEN / "published_configs.jsonl").read_text().splitlines()]


def deepseek(directory: Path, experts: int) -> Path:
    """DeepSeek-V3's sizes, in BF16, with three layers of so many experts; the files are holes."""
    (config,) = (each["config"] for each in PUBLISHED if each["repository"] == "deepseek-ai/DeepSeek-V3")
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    config |= {"num_hidden_layers": 4, "first_k_dense_replace": 1, "n_routed_experts": experts}
    model = from_hf_config(config | {"num_nextn_predict_layers": 0})
    specs = {
        name: TensorSpec(shape, DType.bfloat16)
        for row in table_of(model).spelled({}, model)
        for place in row.places(model)
        for name, shape in zip(names(row, "hf", place), row.shapes(model, "hf"), strict=True)
        if row.present.in_layout("hf", model)
    }
    directory.mkdir()
    writer = HuggingFaceWriter(directory, specs, Companions(), config)
    writer.lay_out()
    writer.finish(None)
    return directory


def planned(source: Path, sizes: Parallelism = ONE_RANK) -> PlannedCommand:
    return plan_command(Request(source, source.with_name("none"), "megatron", parallelism=sizes))


def calls_of_planning(source: Path) -> int:
    """Calls of our functions, whatever else this machine does."""
    count = 0

    def called(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and "precisionctl" in frame.f_code.co_filename

    sys.setprofile(called)
    try:
        planned(source)
    finally:
        sys.setprofile(None)
    return count


def test_work_grows_as_the_number_of_tensors_does(tmp_path: Path) -> None:
    planned(deepseek(tmp_path / "first", 16))  # fills caches
    small, middle, large = (calls_of_planning(deepseek(tmp_path / str(size), size)) for size in (64, 128, 256))
    assert large - middle == pytest.approx(2 * (middle - small), rel=0.02)


@pytest.mark.parametrize("sizes", [Parallelism(tensor=8, pipeline=4, expert=8), *in_soak(ONE_RANK)])
def test_a_plan_and_its_places_take_no_more_memory_than_a_dry_run_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: Parallelism
) -> None:
    source = deepseek(tmp_path / "source", 64)
    planned(source, sizes).writer.chunks("embedding.word_embeddings.weight")
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    command = planned(source, sizes)
    command.writer.chunks("embedding.word_embeddings.weight")  # places all boxes
    taken = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    monkeypatch.setattr("precisionctl.conversion.estimate.worker_memory", lambda plan: 0)
    said = estimate(command.plan, command.reader, tmp_path / "out", workers=2).memory
    assert said / 4 < taken <= said


def test_a_dry_run_says_the_buffers_that_a_worker_has() -> None:
    tracemalloc.start()
    buffers = Buffers()
    taken = tracemalloc.get_traced_memory()[0] + buffers.scratch.nbytes
    tracemalloc.stop()
    moved = {"w": TensorSpec((64, 64), DType.bfloat16)}
    plan = SimpleNamespace(targets=moved, jobs=(), from_layout="hf", to_layout="hf")
    assert worker_memory(plan) == pytest.approx(taken, rel=0.01)  # type: ignore[arg-type]


def test_the_time_is_of_the_encoding_that_the_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pico.save(tmp_path / "hf", hidden_size=128, intermediate_size=128, dtype=torch.bfloat16)
    searches = []
    search = nibbles.squared_errors
    monkeypatch.setattr(nibbles, "squared_errors", lambda *args: searches.append(args) or search(*args))
    monkeypatch.setattr("precisionctl.conversion.estimate._copy_rate", lambda reader, directory: 1e6)
    for scheme, looks_twice in (("nvfp4a16", True), ("w4a16", True), ("mxfp4", False), ("dynamic", False)):
        request = Request.export(source=tmp_path / "hf", destination=tmp_path / "out", target="vllm", scheme=scheme)
        command = plan_command(request)
        searches.clear()
        seconds = estimate(command.plan, command.reader, tmp_path / "out", workers=2).seconds
        assert seconds is not None and seconds > command.plan.nbytes / 1e6
        assert bool(searches) == looks_twice


def test_to_read_back_takes_the_time_of_another_pass_and_ranks_divide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pico.save(tmp_path / "hf")
    command = planned(tmp_path / "hf")
    monkeypatch.setattr("precisionctl.conversion.estimate._copy_rate", lambda reader, directory: 1e6)
    monkeypatch.setattr("precisionctl.conversion.estimate._encode_seconds", lambda plan: 5.0)
    once, twice = (
        estimate(command.plan, command.reader, tmp_path / "out", workers=2, verify=verify).seconds
        for verify in (False, True)
    )
    assert once == command.plan.nbytes / 1e6 + 2.5 and twice == 2 * once
    assert estimate(command.plan, command.reader, tmp_path / "out", workers=2, ranks=4).seconds == once / 4


@pytest.mark.parametrize("container", ["torch_dist", "torch"])
def test_room_is_needed_for_each_byte_that_ranks_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, container: str
) -> None:
    disk = SimpleNamespace(total=1 << 50, free=1 << 50)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    sizes = Parallelism(tensor=2, pipeline=2, expert=2)
    source = deepseek(tmp_path / "source", 16)
    command = plan_command(Request(source, tmp_path / "none", "megatron", container=container, parallelism=sizes))
    check_room(command)
    assert "_placement" not in vars(command.writer), "to place the boxes of many ranks takes longer than to plan"
    boxes = ((spec, chunk.box) for name, spec in command.writer.specs.items() for chunk in command.writer.chunks(name))
    disk.free = sum(spec.dtype.itemsize * box.rows * box.columns for spec, box in boxes)
    assert (disk.free > command.plan.nbytes) == (container == "torch")
    check_room(command)
    disk.free -= 1
    with pytest.raises(DiskProblem, match="Make room for 1 B more"):
        check_room(command)


def test_tensors_that_are_alike_share_one_description(tmp_path: Path) -> None:
    command = planned(deepseek(tmp_path / "source", 64))
    for specs in (command.reader.specs, command.plan.targets):
        assert len({id(spec) for spec in specs.values()}) == len(set(specs.values())) < len(specs) / 10


def test_single_rows_are_moved_in_memory_and_yet_have_scales_of_their_own(tmp_path: Path) -> None:
    """MiniCPM3's rotary pairs: copied one by one they took thirty times as long."""
    pico.save(tmp_path / "hf", "minicpm3", dtype=torch.bfloat16)
    plan = planned(tmp_path / "hf").plan
    computed = [job.row for job in plan.jobs if plan.computes(job)]
    assert {row.megatron.rpartition("self_attention.")[2] for row in computed} == {
        "linear_q_up_proj.weight",
        "linear_kv_down_proj.weight",
    }
    assert all(row.moves_rows(plan.model) for row in computed), "or exports would refuse scales of rows"
