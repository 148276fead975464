"""Universal checkpoints of DeepSpeed that we write hold the optimizer of any source, under names in memory."""

from pathlib import Path

import conversions
import deepspeed_files as files
import pico
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from soaking import in_soak
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from trained_models import config_of, moments, save, states, trained

from precisionctl.checkpoints.base import Companions, WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.deepspeed.writer import DeepSpeedWriter
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.other_trainers.trainer_run import TrainerRun
from precisionctl.dtypes import DType
from precisionctl.errors import MappingError, RecipeError
from precisionctl.param import TensorSpec

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
UNIVERSAL = "deepspeed-universal"


def stored(root: Path) -> dict[str, dict[str, Tensor]]:
    """What is in `zero/`, by kind and parameter, loaded by PyTorch."""
    zero = root / (root / "latest_universal").read_text() / "zero"
    found: dict[str, dict[str, Tensor]] = {}
    for path in sorted(zero.glob("*/*.pt")):
        loaded = torch.load(path, weights_only=True)
        found.setdefault(path.stem, {})[path.parent.name] = loaded if path.stem == "step" else loaded["param"]
    return found


def assert_holds(root: Path, expected: dict[str, dict[str, Tensor]], updates: int) -> None:
    found = stored(root)
    for kind, tensors in expected.items():
        assert found[kind].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[kind][name].dtype == torch.float32 and torch.equal(found[kind][name], tensor), (kind, name)
    assert {float(step) for step in found["step"].values()} == {updates}
    assert found["step"].keys() == expected["exp_avg"].keys()


@pytest.mark.parametrize("stage", [1, 3])
def test_what_ranks_have_is_there_parameter_by_parameter(tmp_path: Path, stage: int) -> None:
    pico.save(tmp_path / "hf", "llama-3")
    made = files.states_of(load_file(tmp_path / "hf" / "model.safetensors"))
    files.save(tmp_path / "run", made, stage, 3)
    for out in ("out", "again"):
        conversions.run(
            tmp_path / "run", tmp_path / out, "hf", container=UNIVERSAL, reference=tmp_path / "hf", verify=True
        )
    assert_holds(tmp_path / "out", made, 3)
    assert conversions.tree(tmp_path / "out") == conversions.tree(tmp_path / "again")
    conversions.run(tmp_path / "run", tmp_path / "mcore", "megatron", "bf16", reference=tmp_path / "hf")
    notes = conversions.run(tmp_path / "mcore", tmp_path / "by-megatron", "hf", container=UNIVERSAL).notes
    left = "the schedule of learning rates, random generators, the order of data"
    assert f"Not carried over from the run: {left}." in notes
    assert_holds(tmp_path / "by-megatron", made, 3)
    conversions.run(tmp_path / "out", tmp_path / "back", "hf")  # config.json is beside it
    weights = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(weights[name], one) for name, one in made["fp32"].items())


@pytest.mark.parametrize("family", ["gemma4-moe", *in_soak("llama-tied", "qwen3-moe", "gemma4")])
def test_a_run_of_pytorch_comes_with_the_names_of_its_class(tmp_path: Path, family: str) -> None:
    model, optimizer = trained(family)
    made, reference = save(tmp_path / "dcp", states(model, optimizer)), config_of(model, tmp_path / "config")
    conversions.run(made, tmp_path / "mcore", "megatron", "bf16", reference=reference)
    expected = {kind: moments(model, optimizer, kind) for kind in ("exp_avg", "exp_avg_sq")}
    expected["fp32"] = dict(model.state_dict())
    for source, told in ((made, reference), (tmp_path / "mcore", None)):
        out = tmp_path / f"of-{source.name}"
        conversions.run(source, out, "hf", container=UNIVERSAL, reference=told)
        assert_holds(out, expected, 2)
    conversions.run(out, tmp_path / "back", "megatron", "bf16")  # with the tied copy, which has no moments
    mcore, back = (WithOptimizer(open_checkpoint(tmp_path / name)) for name in ("mcore", "back"))
    assert mcore.specs.keys() == back.specs.keys() > set(mcore.reader.specs)
    assert all(torch.equal(read_tensor(mcore, name), read_tensor(back, name)) for name in mcore.specs)


def test_groups_of_the_run_that_goes_on_keep_their_decay_and_get_the_rest(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-3")
    made = files.states_of(load_file(tmp_path / "hf" / "model.safetensors"))
    files.save(tmp_path / "run", made, 2, 2)
    conversions.run(tmp_path / "run", tmp_path / "out", "hf", container=UNIVERSAL, reference=tmp_path / "hf")
    directory = tmp_path / "out" / "global_step3_universal"
    beside = torch.load(directory / "zero" / "optimizer_state.pt", weights_only=True)
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": []}
    assert beside["param_groups"] == [group] * len(made["fp32"])
    assert beside["optimizer_state_dict"]["param_groups"] == [group]
    decaying = group | {"initial_lr": 2e-3, "weight_decay": 0.1}
    unread = {"ds_version", "param_groups", "optimizer_state_dict"}  # what DeepSpeed reads
    assert {key: beside[key] for key in beside.keys() - unread} == {
        "base_optimizer_state": {"param_groups": [decaying, decaying | {"weight_decay": 0.0}]}
    }
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        assert torch.load(directory / name, weights_only=True)["global_steps"] == 3


def test_settings_that_deepspeed_does_not_load_go_to_whatever_is_made_of_ours(tmp_path: Path) -> None:
    model, optimizer = trained("llama-3")
    for group in optimizer.param_groups:
        group["initial_lr"] = 4e-3
    reference = config_of(model, tmp_path / "config")
    save(tmp_path / "dcp", states(model, optimizer))
    conversions.run(tmp_path / "dcp", tmp_path / "ours", "hf", container=UNIVERSAL, reference=reference)
    notes = conversions.run(tmp_path / "ours", tmp_path / "back", "hf", container="dcp").notes
    assert not [note for note in notes if "default" in note or "decay" in note]
    of_group = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "initial_lr": 4e-3}
    objects = FileSystemReader(tmp_path / "back").read_metadata().state_dict_metadata
    found = {key: None for key in objects if key.startswith("optimizer.param_groups.")}
    dcp.load(found, storage_reader=FileSystemReader(tmp_path / "back"), no_dist=True)
    for number, decay in enumerate((0.1, 0.0)):
        for key, value in (of_group | {"weight_decay": decay}).items():
            assert found[f"optimizer.param_groups.{number}.{key}"] == value
    conversions.run(tmp_path / "ours", tmp_path / "megatron", "megatron", "bf16")
    groups = open_checkpoint(tmp_path / "megatron").common["optimizer"]["optimizer"]["param_groups"]  # type: ignore[attr-defined]
    assert [(group["weight_decay"], group["max_lr"]) for group in groups] == [(0.1, 4e-3), (0.0, 4e-3)]


def test_without_an_optimizer_or_in_bf16_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-3")
    with pytest.raises(MappingError, match="the source has no optimizer"):
        conversions.run(tmp_path / "hf", tmp_path / "out", "hf", container=UNIVERSAL)
    for options in ({"precision": "bf16"}, {"precision": "fp8"}, {"drop_optimizer": True}):
        with pytest.raises(RecipeError):
            conversions.run(tmp_path / "hf", tmp_path / "out", "hf", container=UNIVERSAL, **options)


@pytest.mark.parametrize("name", ["a/b", "..", ".", "", "x" * 300, "\0", "\ud800"])
def test_a_tensor_with_a_name_that_no_directory_can_have_is_refused_before_anything_is_written(
    tmp_path: Path, name: str
) -> None:
    specs = {name: TensorSpec((2,), DType.float32)}
    with pytest.raises(MappingError, match="is no name of a directory"):
        DeepSpeedWriter(tmp_path, specs, Companions(), {}, TrainerRun(1), 1)


def test_the_name_that_a_directory_must_be_able_to_have_is_that_of_a_stack_and_not_of_its_slices(
    tmp_path: Path,
) -> None:
    stack = "x" * 234 + ".experts.gate_up_proj"
    assert len(stack) == 255  # bytes, the most that Linux takes
    specs = {f"{stack}[{expert}]": TensorSpec((2, 2), DType.float32) for expert in range(2)}
    DeepSpeedWriter(tmp_path, specs, Companions(), {}, TrainerRun(1), 1).lay_out()
    (folder,) = tmp_path.glob("*/zero/*")
    assert folder.name == stack
