"""DeepSpeed's checkpoints that lie, or lead elsewhere: one error each, and soon."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed_files as files
import pytest
import torch

from precisionctl.checkpoints.deepspeed.reader import DeepSpeedReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_files.torch_zip_writer import Blank, lay_out
from precisionctl.dtypes import DType
from precisionctl.errors import CheckpointError, DamagedCheckpoint, PrecisionctlError

WEIGHTS = {"a.weight": torch.ones(5, 3), "b.weight": torch.ones(7)}
OPTIMIZER = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture(params=[1, 3])
def directory(request: Any, tmp_path: Path) -> Path:
    return files.save(tmp_path / "run", files.states_of(WEIGHTS), request.param, 2)


def model_states(directory: Path) -> Path:
    return min(directory.glob("*_model_states.pt"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_out(path: Path) -> None:
    outside = path.parents[2] / "outside.pt"
    shutil.move(path, outside)
    path.symlink_to(outside)


@pytest.mark.parametrize("spoil", [pipe, link_out])
def test_pipes_and_links_that_lead_out_are_refused(directory: Path, spoil: Callable[[Path], None]) -> None:
    for path in (directory / OPTIMIZER, model_states(directory)):
        shutil.copytree(directory, directory.with_name("kept"))
        spoil(path)
        with pytest.raises(DamagedCheckpoint, match="not a file|leads out"):
            DeepSpeedReader(directory)
        shutil.rmtree(directory)
        shutil.move(directory.with_name("kept"), directory)
    latest = directory.parent / "latest"
    pipe(latest)
    with pytest.raises(DamagedCheckpoint, match="not a file"):
        open_checkpoint(directory.parent)


def test_a_step_that_is_a_link_out_of_its_folder_is_refused(directory: Path) -> None:
    elsewhere = directory.parents[1] / "elsewhere"
    shutil.move(directory, elsewhere)
    directory.symlink_to(elsewhere)
    with pytest.raises(DamagedCheckpoint, match="leads out"):
        DeepSpeedReader(directory.parent)


def test_a_universal_parameter_behind_a_link_is_refused(tmp_path: Path) -> None:
    files.save_universal(tmp_path / "run", files.states_of(WEIGHTS))
    shutil.move(tmp_path / "run" / "zero" / "a.weight", tmp_path / "a.weight")
    (tmp_path / "run" / "zero" / "a.weight").symlink_to(tmp_path / "a.weight")
    with pytest.raises(DamagedCheckpoint, match="leads out"):
        DeepSpeedReader(tmp_path / "run")


def rewrite(path: Path, change: Callable[[Any], object]) -> None:
    with files.classes():
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)


@pytest.mark.parametrize(
    "shape", [(2**62,), (2**62, 2**62), (0,), (0, 2**62), (5, 3, 0), (1,) * 64, (1,) * 65, (-5, -3), (5.0, 3)]
)
def test_shapes_that_the_bytes_do_not_have_are_refused(directory: Path, shape: Any) -> None:
    def change(content: Any) -> None:
        next(group for group in content["param_shapes"] if "a.weight" in group)["a.weight"] = shape

    rewrite(model_states(directory), change)
    with pytest.raises(CheckpointError):
        DeepSpeedReader(directory)


def test_one_name_for_two_parameters_and_names_of_states_are_refused(directory: Path) -> None:
    for name in ("optimizer.state.exp_avg.a.weight", "m.experts.down_proj[0]"):

        def change(content: Any, name: str = name) -> None:
            for group in content["param_shapes"]:
                for old in [old for old in group if group[old] == (5, 3)]:
                    group[name] = group.pop(old)

        rewrite(model_states(directory), change)
        with pytest.raises(CheckpointError, match="named as (a slice|the optimizer state) of another"):
            DeepSpeedReader(directory)
    rewrite(model_states(directory), lambda content: content.update(param_shapes=content["param_shapes"] * 2))
    with pytest.raises(CheckpointError, match="one name"):
        DeepSpeedReader(directory)


def test_experts_that_nobody_has_are_counted_before_they_are_made(tmp_path: Path) -> None:
    """A sparse file has as many elements as it likes."""
    directory, experts = tmp_path / "global_step1", 1 << 30
    directory.mkdir()
    name, shape = "model.layers.0.mlp.experts.down_proj", (experts, 1)
    model = {"module": {}, "param_shapes": [{name: shape}]}
    torch.save(model, directory / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    flat = Blank(DType.float32, (experts,))
    state = {"zero_stage": 3, "fp32_flat_groups": [flat], "optimizer_state_dict": {"state": {0: {}}}}
    archive = lay_out({"optimizer_state_dict": state})
    archive.write_around(directory / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    began = time.process_time()
    with pytest.raises(DamagedCheckpoint, match="more than 262144 experts"):
        DeepSpeedReader(directory)
    assert time.process_time() - began < 2


def test_bytes_of_a_rank_that_are_cut_off_are_missed_at_once(directory: Path) -> None:
    for path in (directory / OPTIMIZER, model_states(directory)):
        whole = path.read_bytes()
        for end in (0, 3, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:end])
            with pytest.raises(PrecisionctlError):
                DeepSpeedReader(directory)
        path.write_bytes(whole)
