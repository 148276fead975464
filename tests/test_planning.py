"""What plans take: memory as a dry run says, and work that grows as the number of tensors does."""

import json
import sys
import tracemalloc
from pathlib import Path
from types import FrameType

import pytest

from precisionctl.architectures.families import from_hf_config, table_of
from precisionctl.architectures.param_map import names
from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.huggingface import HuggingFaceWriter
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import PlannedCommand
from precisionctl.conversion.estimate import estimate
from precisionctl.dtypes import DType
from precisionctl.param import TensorSpec

PUBLISHED = [json.loads(line) for line in Path(__file__).with_name("published_configs.jsonl").read_text().splitlines()]


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


def planned(source: Path) -> PlannedCommand:
    return plan_command(Request(source, source.with_name("none"), "megatron"))


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


def test_a_plan_takes_no_more_memory_than_a_dry_run_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = deepseek(tmp_path / "source", 64)
    planned(source)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    command = planned(source)
    taken = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    monkeypatch.setattr("precisionctl.conversion.estimate.worker_memory", lambda plan: 0)
    said = estimate(command.plan, command.reader, tmp_path / "out", workers=2).memory
    assert said / 4 < taken <= said


def test_tensors_that_are_alike_share_one_description(tmp_path: Path) -> None:
    command = planned(deepseek(tmp_path / "source", 64))
    for specs in (command.reader.specs, command.plan.targets):
        assert len({id(spec) for spec in specs.values()}) == len(set(specs.values())) < len(specs) / 10
