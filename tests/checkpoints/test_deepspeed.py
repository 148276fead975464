"""DeepSpeed's checkpoints are read as what was saved, whatever the stage and the number of ranks."""

import os
import shutil
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import conversions
import deepspeed_files as files
import pico
import pytest
import torch
from safetensors.torch import load_file, save_file
from target_checks import check_directory
from torch import Tensor

from precisionctl.checkpoints.base import Hints, Reader, WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.deepspeed.reader import DeepSpeedReader, step_directory
from precisionctl.checkpoints.hf_directory.companions import read_companions
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.commands.request import OTHER_TARGETS
from precisionctl.dtypes import DType
from precisionctl.engines.base import engines
from precisionctl.errors import (
    CheckpointError,
    DamagedCheckpoint,
    MissingTensor,
    PrecisionctlError,
    UnknownFormat,
    UnsafePickle,
)
from precisionctl.reports import inspect

ODD: dict[str, Any] = {"vocab_size": 251, "intermediate_size": 93}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of Hugging Face whose sizes are odd."""
    folder = tmp_path_factory.mktemp("llama")
    pico.save(folder, "llama-3", **ODD)
    return folder


def weights_of(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def read(path: Path, reference: Path) -> DeepSpeedReader:
    reader = open_checkpoint(path, hints=Hints(companions=read_companions(reference)))
    assert isinstance(reader, DeepSpeedReader)
    return reader


def assert_is(reader: DeepSpeedReader, states: Mapping[str, Mapping[str, Tensor]]) -> None:
    class Both:
        specs = {**reader.specs, **reader.optimizer_specs}
        chunks = staticmethod(reader.chunks)

    for kind, tensors in states.items():
        prefix = "" if kind == "fp32" else f"optimizer.state.{kind}."
        for name, tensor in tensors.items():
            assert torch.equal(read_tensor(Both, f"{prefix}{name}"), tensor), (kind, name)


@pytest.mark.parametrize("target", [*engines(), *OTHER_TARGETS])
def test_it_is_for_an_export_first_though_nothing_says_which_model_it_is(
    tmp_path: Path, llama: Path, target: str
) -> None:
    files.save(tmp_path, files.states_of(weights_of(llama)), 2, 2)
    with pytest.raises(UnknownFormat, match=rf"deepspeed.* `?(precisionctl )?export-inference .*--target {target}\b"):
        check_directory(tmp_path, target)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_and_moments_are_what_ranks_have_together(tmp_path: Path, llama: Path, stage: int, ranks: int) -> None:
    states = files.states_of(weights_of(llama))
    files.save(tmp_path / "run", states, stage, ranks, padded=ranks == 2, spaced=stage == 1)
    reader = read(tmp_path / "run", llama)
    assert_is(reader, states)
    assert reader.specs.keys() == states["fp32"].keys()
    assert len(reader.optimizer_specs) == 2 * len(reader.specs)
    assert (reader.iteration, reader.container) == (3, "deepspeed")


@pytest.mark.parametrize("stage", [2, 3])
def test_conversions_of_it_are_those_of_the_model(tmp_path: Path, llama: Path, stage: int) -> None:
    states = files.states_of(weights_of(llama))
    files.save(tmp_path / "run", states, stage, 3)
    for to in ("hf", "megatron"):
        conversions.run(tmp_path / "run", tmp_path / to, to, reference=llama, verify=True, drop_optimizer=True)
    conversions.run(tmp_path / "run", tmp_path / "bf16", "hf", "bf16", reference=llama)
    conversions.run(tmp_path / "megatron", tmp_path / "back", "hf")
    for name, master in states["fp32"].items():
        assert torch.equal(weights_of(tmp_path / "hf")[name], master)
        assert torch.equal(conversions.tensors(tmp_path / "back")[name], master)
        assert torch.equal(weights_of(tmp_path / "bf16")[name], master.bfloat16())


@pytest.mark.parametrize("stage", [1, 3])
def test_masters_and_moments_go_to_megatron_where_weights_of_their_names_go(
    tmp_path: Path, llama: Path, stage: int
) -> None:
    states = files.states_of(weights_of(llama))
    files.save(tmp_path / "run", states, stage, 3)
    told = conversions.run(tmp_path / "run", tmp_path / "out", "megatron", "bf16", reference=llama, verify=True)
    reader = open_checkpoint(tmp_path / "out")
    assert isinstance(reader, TorchDistReader) and reader.iteration == 3
    for kind, tensors in states.items():
        shutil.copytree(llama, tmp_path / kind)
        save_file(tensors, tmp_path / kind / "model.safetensors", {"format": "pt"})
        conversions.run(tmp_path / kind, tmp_path / f"{kind}-in-megatron", "megatron")
        for name, tensor in conversions.tensors(tmp_path / f"{kind}-in-megatron").items():
            stored = f"optimizer.state.{kind.replace('fp32', 'param')}.{name}"
            assert torch.equal(read_tensor(WithOptimizer(reader), stored), tensor), stored
    (inner,) = (reader.common["optimizer"]["optimizer"],)
    assert inner["state"] == {"common_step": 3} and inner["param_groups"][0]["max_lr"] == 2e-3
    assert any("loss scaler" in note for note in told.notes)


@pytest.mark.parametrize("flat", [False, True])
def test_a_universal_checkpoint_is_read_parameter_by_parameter(tmp_path: Path, llama: Path, flat: bool) -> None:
    states = files.states_of(weights_of(llama))
    directory = files.save_universal(tmp_path / "run" / "global_step3_universal", states, flat=flat)
    (tmp_path / "run" / "latest_universal").write_text(directory.name)
    if flat:
        files.save(tmp_path / "zero", states, 3, 2)
        for path in (tmp_path / "zero" / "global_step3").glob("*model_states.pt"):
            shutil.copy(path, directory)
    reader = read(tmp_path / "run", llama)
    assert_is(reader, states)
    assert (reader.container, reader.specs.keys()) == ("deepspeed-universal", states["fp32"].keys())


@pytest.mark.parametrize(
    ("file", "value", "why"),
    [
        ("exp_avg_sq.pt", None, "moments, which `model.norm.weight` lacks in part"),
        ("step.pt", 99, "parameters differ in it"),
    ],
)
def test_moments_of_a_universal_checkpoint_that_do_not_belong_together_stay_behind_with_a_word(
    tmp_path: Path, llama: Path, file: str, value: int | None, why: str
) -> None:
    states = files.states_of(weights_of(llama))
    directory = files.save_universal(tmp_path / "run" / "global_step3_universal", states)
    path = directory / "zero" / "model.norm.weight" / file
    path.unlink() if value is None else torch.save(torch.tensor(float(value)), path)
    told = conversions.run(directory, tmp_path / "out", "hf", reference=llama)
    assert any("stay behind: " in note and why in note for note in told.notes), told.notes
    assert_is(read(directory, llama), {"fp32": states["fp32"]})


def test_a_parameter_of_a_universal_checkpoint_without_any_moments_is_named(tmp_path: Path, llama: Path) -> None:
    directory = files.save_universal(tmp_path / "global_step3_universal", files.states_of(weights_of(llama)))
    for file in ("exp_avg.pt", "exp_avg_sq.pt", "step.pt"):
        (directory / "zero" / "model.norm.weight" / file).unlink()
    with pytest.raises(MissingTensor, match=r"no state of 1 parameter, such as `model\.norm\.weight`: frozen, or"):
        conversions.run(directory, tmp_path / "out", "megatron", reference=llama)
    conversions.run(directory, tmp_path / "out", "megatron", reference=llama, drop_optimizer=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_and_shared_parameters_are_read_where_they_are(tmp_path: Path, stage: int) -> None:
    pico.save(tmp_path / "hf", "llama-tied", **ODD)
    weights = weights_of(tmp_path / "hf")
    frozen = {name: one.bfloat16() for name, one in weights.items() if "layers.0.mlp" in name or "model.norm" in name}
    states = files.states_of({name: one for name, one in weights.items() if name not in frozen})
    shared = {"lm_head.weight": "model.embed_tokens.weight"}
    files.save(tmp_path / "run", states, stage, 2, frozen=frozen, shared=shared)
    reader = read(tmp_path / "run", tmp_path / "hf")
    assert_is(reader, states | {"": {}})
    for name, one in frozen.items():
        assert reader.specs[name].dtype == DType.bfloat16 and torch.equal(read_tensor(reader, name), one)
    conversions.run(tmp_path / "run", tmp_path / "out", "hf", reference=tmp_path / "hf")
    assert weights_of(tmp_path / "out").keys() == weights.keys()
    without_state = rf"no state of {len(frozen)} parameters, such as `model\.layers\.0\.mlp\..*`: frozen"
    for layout, container in (("megatron", None), ("hf", "dcp"), ("hf", "deepspeed-universal")):
        with pytest.raises(MissingTensor, match=without_state):
            conversions.run(tmp_path / "run", tmp_path / "x", layout, reference=tmp_path / "hf", container=container)
    conversions.run(tmp_path / "run", tmp_path / "megatron", "megatron", reference=tmp_path / "hf", drop_optimizer=True)


@pytest.mark.parametrize("stage", [1, 3])
def test_experts_in_one_tensor_become_those_that_their_class_saves(tmp_path: Path, stage: int) -> None:
    model = pico.make_and_save(tmp_path / "hf", "qwen3-moe")
    states = files.states_of(model.state_dict())
    assert any(name.endswith("experts.gate_up_proj") for name in states["fp32"])
    files.save(tmp_path / "run", states, stage, 3)
    conversions.run(tmp_path / "run", tmp_path / "megatron", "megatron", reference=tmp_path / "hf", drop_optimizer=True)
    conversions.run(tmp_path / "megatron", tmp_path / "out", "hf")
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(states["fp32"][name])
    model.save_pretrained(tmp_path / "by-transformers")
    expected = weights_of(tmp_path / "by-transformers")
    ours = weights_of(tmp_path / "out")
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in ours)


def test_without_zero_weights_are_read_as_the_model_has_them(tmp_path: Path, llama: Path) -> None:
    states = files.states_of(weights_of(llama))
    files.save(tmp_path / "run", states, 0, 1)
    reader = read(tmp_path / "run", llama)
    assert {spec.dtype for spec in reader.specs.values()} == {DType.bfloat16} and not reader.optimizer_specs
    assert_is(reader, {"fp32": {name: one.bfloat16() for name, one in states["fp32"].items()}})


def test_a_folder_of_trainers_is_its_weights_and_the_step_in_it_their_masters(tmp_path: Path, llama: Path) -> None:
    states, folder = files.states_of(weights_of(llama)), tmp_path / "checkpoint-3"
    files.save(folder, states, 2, 2)
    shutil.copy(llama / "config.json", folder)
    assert open_checkpoint(folder).container == "deepspeed"
    assert_is(read(folder, llama), states)
    shutil.copy(llama / "model.safetensors", folder)
    assert open_checkpoint(folder).container == "safetensors"
    told = conversions.run(folder, tmp_path / "out", "megatron")
    assert any("optimizer of DeepSpeed stay behind: give global_step3" in note for note in told.notes)
    step: Reader = open_checkpoint(folder / "global_step3")
    assert step.container == "deepspeed" and step.model.hidden_size == 64
    for file in ("config.json", "model.safetensors"):  # as zero_to_fp32.py may write them beside what it read
        shutil.copy(llama / file, folder / "global_step3")
    told = conversions.run(folder / "global_step3", tmp_path / "of-step", "megatron")
    assert any("stay behind: give a folder with its files alone" in note for note in told.notes), told.notes


def test_an_iteration_is_chosen_by_its_number(tmp_path: Path, llama: Path) -> None:
    old, new = (files.states_of(weights_of(llama), seed) for seed in (1, 2))
    files.save(tmp_path / "run", old, 1, 1, step=3)
    files.save(tmp_path / "run", new, 1, 1, step=6)
    hints = Hints(companions=read_companions(llama))
    for iteration, step in ((None, 6), (3, 3), (6, 6)):
        assert open_checkpoint(tmp_path / "run", iteration, hints).iteration == step
    with pytest.raises(CheckpointError, match="global_step5 is not there"):
        open_checkpoint(tmp_path / "run", 5, hints)
    for iteration in (5, 6):
        with pytest.raises(CheckpointError, match="Leave --iteration out: there is only this one"):
            open_checkpoint(tmp_path / "run" / "global_step6", iteration, hints)
    files.save_universal(tmp_path / "run" / "global_step5_universal", old)
    assert_is(open_checkpoint(tmp_path / "run", 5, hints), old)  # type: ignore[arg-type]


def test_it_asks_for_the_config_that_it_does_not_have(tmp_path: Path, llama: Path) -> None:
    files.save(tmp_path / "run", files.states_of(weights_of(llama)), 3, 1)
    reader = open_checkpoint(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"does not say which model it is.*--reference"):
        _ = reader.model
    described = inspect.describe(reader)
    assert (described["container"], described["architecture"], described["optimizer"]["tensors"]) == (
        "deepspeed",
        None,
        42,
    )
    inspect.tables(described)


@pytest.mark.parametrize(
    ("stage", "there", "gone", "message"),
    [
        (2, None, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "files of 1 rank,"),
        (2, None, "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", r"files of ranks \[1\]"),
        (3, None, "zero_pp_rank_0_mp_rank_00_model_states.pt", r"files of ranks \[1\]"),
        (2, "mp_rank_01_model_states.pt", None, "tensor parallelism"),
        (2, "layer_00-model_00-model_states.pt", None, "pipeline or expert"),
        (2, "layer_0_expert_3_mp_rank_00_model_states.pt", None, "pipeline or expert"),
        (2, "expp_rank_0_mp_rank_00_optim_states.pt", None, "pipeline or expert"),
    ],
)
def test_ranks_that_are_missing_and_other_ways_to_cut_are_named(
    tmp_path: Path, llama: Path, stage: int, there: str | None, gone: str | None, message: str
) -> None:
    directory = files.save(tmp_path / "run", files.states_of(weights_of(llama)), stage, 2)
    if there:
        (directory / there).touch()
    if gone:
        (directory / gone).unlink()
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path / "run", llama)


def rewrite(path: Path, change: Any) -> None:
    with files.classes():
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)


def _longer(content: Any) -> None:
    group = next(group for group in content["param_shapes"] if "model.norm.weight" in group)
    group["model.norm.weight"] = torch.Size([64_000])


@pytest.mark.parametrize(
    ("stage", "name", "change", "message"),
    [
        (1, "mp_rank_00_model_states.pt", _longer, "of group"),
        (3, "zero_pp_rank_0_mp_rank_00_model_states.pt", _longer, "a rank has"),
        (1, "mp_rank_00_model_states.pt", lambda c: c["param_shapes"].pop(), "other groups"),
        (2, "mp_rank_00_model_states.pt", lambda c: c.update(shared_params={"a": "b"}), "`b`, which others share"),
        (2, "mp_rank_00_model_states.pt", lambda c: c.update(num_experts=[4]), "distributed over ranks"),
        (2, "mp_rank_00_model_states.pt", lambda c: c.update(global_steps=-1), "-1 steps"),
        (2, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", lambda c: c.pop("optimizer_state_dict"), "KeyError"),
    ],
)
def test_files_that_contradict_one_another_are_refused(
    tmp_path: Path, llama: Path, stage: int, name: str, change: Any, message: str
) -> None:
    directory = files.save(tmp_path / "run", files.states_of(weights_of(llama)), stage, 2)
    rewrite(directory / name, change)
    with pytest.raises(CheckpointError, match=message):
        _ = read(tmp_path / "run", llama).iteration


def test_parameters_in_another_order_than_their_shapes_are_noticed(tmp_path: Path, llama: Path) -> None:
    directory = files.save(tmp_path / "run", files.states_of(weights_of(llama)), 1, 2)

    def turn_round(content: Any) -> None:
        content["param_shapes"] = [dict(reversed(group.items())) for group in content["param_shapes"]]

    rewrite(directory / "mp_rank_00_model_states.pt", turn_round)
    with pytest.raises(DamagedCheckpoint, match="masters are not those of the weights"):
        read(tmp_path / "run", llama)


def test_an_optimizer_that_is_not_adam_stays_behind(tmp_path: Path, llama: Path) -> None:
    states = files.states_of(weights_of(llama))
    directory = files.save(tmp_path / "run", states, 1, 1)

    def to_momentum(content: Any) -> None:
        for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["momentum_buffer"] = state.pop("exp_avg")
            del state["exp_avg_sq"]

    rewrite(directory / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", to_momentum)
    reader = read(tmp_path / "run", llama)
    assert not reader.optimizer_specs
    assert_is(reader, {"fp32": states["fp32"]})
    told = conversions.run(tmp_path / "run", tmp_path / "out", "hf", reference=llama)
    assert any("stay behind: ['momentum_buffer'], which AdamW has not" in note for note in told.notes)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_count_of_the_fused_adam_is_that_of_its_states(tmp_path: Path, llama: Path, stage: int) -> None:
    """Its groups have had a 0 from the first update on (deepspeed/ops/adam/fused_adam.py)."""
    directory = files.save(tmp_path / "run", files.states_of(weights_of(llama)), stage, 2)

    def as_fused_adam(content: Any) -> None:
        saved = content["optimizer_state_dict"]
        base = saved["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
        for group in base["param_groups"]:
            group.update(bias_correction=True, step=0)

    for file in directory.glob("*_optim_states.pt"):
        rewrite(file, as_fused_adam)
    assert read(tmp_path / "run", llama).trainer_run.updates == 3


def test_moments_of_groups_with_different_counts_stay_behind_and_ranks_that_differ_are_damage(
    tmp_path: Path, llama: Path
) -> None:
    states = files.states_of(weights_of(llama))
    directory = files.save(tmp_path / "run", states, 2, 2)

    def one_more(content: Any) -> None:
        content["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["step"] += 1

    first, second = sorted(directory.glob("*_optim_states.pt"))
    rewrite(first, one_more)
    with pytest.raises(DamagedCheckpoint, match=r"other numbers of updates than other ranks"):
        read(tmp_path / "run", llama)
    rewrite(second, one_more)
    reader = read(tmp_path / "run", llama)
    assert not reader.optimizer_specs and "different numbers of updates: [3, 4]" in reader.unsupported_state
    assert_is(reader, {"fp32": states["fp32"]})


def test_a_rank_that_says_no_count_of_updates_has_that_of_the_others(tmp_path: Path, llama: Path) -> None:
    directory = files.save(tmp_path / "run", files.states_of(weights_of(llama)), 2, 2)

    def without(content: Any) -> None:
        for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            del state["step"]

    for file in sorted(directory.glob("*_optim_states.pt")):
        assert read(tmp_path / "run", llama).trainer_run.updates == 3
        rewrite(file, without)


@pytest.mark.parametrize(
    ("states", "groups", "updates"),
    [
        ({0: {"step": 7}, 1: {"step": 7}}, [{"lr": 1e-3, "step": 0}], 7),
        ({0: {"step": 7}, 1: {"step": 9}}, [{"lr": 1e-3}], None),
        ({}, [{"lr": 1e-3, "step": 7}, {"lr": 1e-3, "step": 9}], None),
    ],
)
def test_the_count_of_a_universal_checkpoint_of_zero_3_is_that_of_all_groups(
    tmp_path: Path, llama: Path, states: Any, groups: Any, updates: int | None
) -> None:
    directory = files.save_universal(tmp_path / "run", files.states_of(weights_of(llama)))
    for file in directory.glob("zero/*/step.pt"):
        file.unlink()
    saved = {"param_groups": groups, "optimizer_state_dict": {"state": states, "param_groups": groups}}
    torch.save(saved, directory / "zero" / "optimizer_state.pt")
    reader = read(directory, llama)
    if updates is None:
        assert not reader.optimizer_specs and "parameters differ in it" in reader.unsupported_state
    else:
        assert reader.trainer_run.updates == updates


def test_a_class_that_is_not_deepspeeds_is_refused(tmp_path: Path, llama: Path) -> None:
    directory = files.save(tmp_path / "run", files.states_of(weights_of(llama)), 1, 1)
    torch.save({"module": {}, "x": Fraction(1, 2)}, directory / "mp_rank_00_model_states.pt")
    with pytest.raises(UnsafePickle, match="fractions.Fraction"):
        read(tmp_path / "run", llama)


@pytest.mark.parametrize("name", ["../../other/global_step3", "..", "x" * 300, "x\0"])
def test_latest_names_nothing_outside_its_folder(tmp_path: Path, llama: Path, name: str) -> None:
    run = files.save(tmp_path / "other", files.states_of(weights_of(llama)), 1, 1) / "run"
    run.mkdir()
    (run / "latest").write_text(name)
    with pytest.raises(PrecisionctlError, match="there is no checkpoint in a known format"):
        open_checkpoint(run)


@pytest.mark.parametrize("linked", [True, False])
def test_latest_that_is_a_directory_is_nothing_of_deepspeeds(tmp_path: Path, llama: Path, linked: bool) -> None:
    """Such a link to the newest step is common in folders of Megatron's."""
    run = tmp_path / "run"
    conversions.run(llama, run, "megatron")
    if linked:
        (run / "latest").symlink_to("release")
    else:
        (run / "latest").mkdir()
    assert isinstance(open_checkpoint(run), TorchDistReader)


def test_a_folder_need_not_be_listed_for_what_latest_names(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of mode 711, as directories above others' are: looking for a name is allowed there, listing is not."""
    step = files.save(tmp_path / "run", files.states_of(weights_of(llama)), 1, 1)
    (tmp_path / "run" / "latest").unlink()
    closed = str(tmp_path / "run")

    def refusing(lists: Callable[..., Any]) -> Callable[..., Any]:
        def listed(path: Any = ".") -> Any:
            if str(path) == closed:
                raise PermissionError(13, "Permission denied", closed)
            return lists(path)

        return listed

    monkeypatch.setattr(os, "listdir", refusing(os.listdir))
    monkeypatch.setattr(os, "scandir", refusing(os.scandir))
    assert step_directory(tmp_path / "run") is None
    (tmp_path / "run" / "latest").write_text(step.name)
    assert step_directory(tmp_path / "run") == step


@pytest.mark.parametrize("bf16", [False, True])
def test_without_zero_parameters_are_told_by_the_order_of_the_model(tmp_path: Path, llama: Path, bf16: bool) -> None:
    model = pico.make("llama-3", **ODD)
    states = files.states_of({name: one.detach() for name, one in model.named_parameters()})
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "mp_rank_00_model_states.pt"
    torch.save(saved := files.without_zero(states, bf16=bf16), path)
    reader = read(tmp_path / "run", llama)
    assert_is(reader, states)
    run = reader.trainer_run
    assert (reader.unsupported_state, run.updates, run.settings["initial_lr"]) == ("", 3, 2e-3)
    inner = saved["optimizer"].get("optimizer_state_dict", saved["optimizer"])
    inner["param_groups"][0]["params"].pop()
    torch.save(saved, path)
    assert "none of this model's; was a part of it frozen?" in read(tmp_path / "run", llama).unsupported_state


def test_without_zero_the_fused_adam_counts_in_the_last_parameter_of_a_group(tmp_path: Path, llama: Path) -> None:
    """Its `step` adds 1 to the state that its loop over a group's gradients ended with, and gives the kernel that count
    for all of them (deepspeed/ops/adam/fused_adam.py)."""
    states = files.states_of({name: one.detach() for name, one in pico.make("llama-3", **ODD).named_parameters()})
    saved = files.without_zero(states, bf16=False)
    optimizer = saved["optimizer"]
    names = sorted(states["exp_avg"], key=lambda name: states["exp_avg"][name].dim() == 1)  # norms are not decayed
    optimizer["state"] = numbered = {
        number: {kind: states[kind][name] for kind in files.KINDS[1:]} for number, name in enumerate(names)
    }
    last = len(names) - 1
    half = sum(states["exp_avg"][name].dim() > 1 for name in names)
    group = optimizer["param_groups"][0] | {"step": 0}
    optimizer["param_groups"] = groups = [
        {**group, "params": list(range(half))},
        {**group, "params": list(range(half, last + 1)), "weight_decay": 0.0},
    ]

    def read_with(counts: dict[int, int]) -> DeepSpeedReader:
        for each in groups:
            for index in each["params"]:
                numbered[index]["step"] = 0
        for index, count in counts.items():
            numbered[index]["step"] = count
        (tmp_path / "run").mkdir(exist_ok=True)
        torch.save(saved, tmp_path / "run" / "mp_rank_00_model_states.pt")
        return read(tmp_path / "run", llama)

    reader = read_with({half - 1: 3, last: 3})
    assert (reader.unsupported_state, reader.trainer_run.updates) == ("", 3)
    assert_is(reader, states)
    # another parameter was the last for an update; groups differ; the optimizer is one that counts for each parameter
    assert "different numbers of updates" in read_with({half - 2: 1, half - 1: 2, last: 3}).unsupported_state
    assert "different numbers of updates" in read_with({half - 1: 2, last: 3}).unsupported_state
    for each in groups:
        del each["step"]
    assert "different numbers of updates" in read_with({half - 1: 3, last: 3}).unsupported_state


@pytest.mark.parametrize("bf16", [False, True])
def test_an_optimizer_that_has_made_no_update_is_none_beside_its_masters(
    tmp_path: Path, llama: Path, bf16: bool
) -> None:
    model = pico.make("llama-3", **ODD)
    states = files.states_of({name: one.detach() for name, one in model.named_parameters()})
    saved = files.without_zero(states, bf16=bf16)
    saved["optimizer"].get("optimizer_state_dict", saved["optimizer"])["state"].clear()
    (tmp_path / "run").mkdir()
    torch.save(saved, tmp_path / "run" / "mp_rank_00_model_states.pt")
    reader = read(tmp_path / "run", llama)
    assert_is(reader, {"fp32": states["fp32"]})
    assert reader.unsupported_state == "" and not reader.optimizer_specs


def test_universal_masters_that_the_model_has_are_held_against_it(tmp_path: Path, llama: Path) -> None:
    """Without `param_shapes`, as of a model that nothing was trained of, they would be ignored."""
    states = files.states_of(weights_of(llama))
    directory = files.save_universal(tmp_path / "run", {"fp32": states["fp32"]})
    module = {name: one.bfloat16() for name, one in states["fp32"].items()}
    torch.save({"module": module, "param_shapes": []}, directory / "mp_rank_00_model_states.pt")
    assert read(directory, llama).specs.keys() == module.keys()
    (directory / "zero" / "lm_head.weight" / "exp_avg_old.pt").touch()
    assert "exp_avg_old.pt" in read(directory, llama).unsupported_state
    torch.save({"param": states["fp32"]["lm_head.weight"] + 1}, directory / "zero" / "lm_head.weight" / "fp32.pt")
    with pytest.raises(DamagedCheckpoint, match="masters are not those of the weights: 1 of .*, `lm_head.weight`"):
        read(directory, llama)
