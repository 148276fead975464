"""verl's files of FSDP ranks are read as what the ranks had together."""

import shutil
import zipfile
from pathlib import Path
from typing import Any

import conversions
import pico
import pytest
import torch
import verl_files
from soaking import in_soak
from torch import Tensor
from trained_models import moments, trained

from precisionctl.checkpoints.base import WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.verl import VerlReader
from precisionctl.commands.source_notes import reading_notes
from precisionctl.errors import CheckpointError, DamagedCheckpoint

MOMENTS = verl_files.MOMENTS


def actor(tmp_path: Path, family: str, ranks: int, flat: bool = False, **how: Any) -> tuple[Path, dict[str, Tensor]]:
    """`global_step_8/actor` of a trained model of odd sizes, and its tensors by name."""
    model, optimizer = trained(family, vocab_size=251)
    states = {kind: moments(model, optimizer, kind) for kind in MOMENTS}
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if flat:
        names = list(states["exp_avg"])
        layers = [[name for name in names if f".layers.{index}." in name] for index in range(2)]
        how["units"] = [[name for name in names if ".layers." not in name], *layers]
        how["version"] = 1
        weights = {name: tensor.clone() for name, tensor in weights.items()}  # FSDP 1 unties what it saves
    path = verl_files.save(tmp_path / "global_step_8" / "actor", weights, states, ranks, **how)
    pico.save(tmp_path / "hf", family, vocab_size=251)
    (path / "huggingface").mkdir()
    shutil.copy(tmp_path / "hf" / "config.json", path / "huggingface")
    live = {f"optimizer.state.{kind}.{name}": one for kind, found in states.items() for name, one in found.items()}
    return path, {**weights, **live}


def assert_is(path: Path, live: dict[str, Tensor]) -> VerlReader:
    reader = open_checkpoint(path)
    assert isinstance(reader, VerlReader)
    both = WithOptimizer(reader)
    for name, tensor in live.items():
        if name in both.specs:
            assert torch.equal(read_tensor(both, name), tensor), name
        else:  # a stack of experts
            assert all(torch.equal(read_tensor(both, f"{name}[{at}]"), one) for at, one in enumerate(tensor)), name
    return reader


@pytest.mark.parametrize(
    ("family", "ranks", "replicas", "flat"),
    [
        ("llama-tied", 3, 1, False),
        ("llama-3", 2, 2, False),
        ("qwen3-moe", 2, 1, False),
        ("llama-tied", 3, 1, True),
        ("llama-3", 2, 2, True),
        *in_soak(("llama-3", 1, 1, False), ("llama-3", 3, 1, True)),  # as the others, but for ties and replicas
    ],
)
def test_masters_and_moments_are_what_the_ranks_of_one_replica_have_together(
    tmp_path: Path, family: str, ranks: int, replicas: int, flat: bool
) -> None:
    path, live = actor(tmp_path, family, ranks, flat, replicas=replicas)
    reader = assert_is(path, live)
    assert (reader.iteration, reader.trainer_run.updates) == (8, 5)
    assert reader.trainer_run.settings["initial_lr"] == 4e-3


def test_a_run_of_verls_goes_to_megatron_and_comes_back_to_pytorch_to_the_last_bit(tmp_path: Path) -> None:
    path, live = actor(tmp_path, "qwen3-moe", 2)
    conversions.run(path, tmp_path / "megatron", "megatron", "bf16", verify=True)
    conversions.run(tmp_path / "megatron", tmp_path / "back", "hf", container="dcp")
    back: Any = open_checkpoint(tmp_path / "back")
    names = back.optimizer_specs.keys() | back.specs.keys()
    assert names == open_checkpoint(path).specs.keys() | WithOptimizer(open_checkpoint(path)).specs.keys()  # type: ignore[arg-type]
    for name, tensor in live.items():
        if name in names:
            assert torch.equal(read_tensor(WithOptimizer(back), name), tensor), name


def test_weights_without_an_optimizer_are_a_checkpoint(tmp_path: Path) -> None:
    """verl saves what its `checkpoint.save_contents` names: perhaps the model alone."""
    path, live = actor(tmp_path, "llama-3", 2)
    for rank in range(2):
        (path / f"optim_world_size_2_rank_{rank}.pt").unlink()
    reader = open_checkpoint(path)
    assert isinstance(reader, VerlReader) and not reader.optimizer_specs and not reader.unsupported_state
    for name in reader.specs:
        assert torch.equal(read_tensor(reader, name), live[name]), name


def rewrite(path: Path, change: Any) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda saved: saved["state"][1].update(step=torch.tensor(9.0)), "different numbers of updates"),
        (lambda saved: saved["state"][1].update(momentum_buffer=torch.zeros(5)), "momentum_buffer"),
        (lambda saved: saved["state"].update({99: saved["state"][1]}), "parameter 99, which is in none of its groups"),
        (lambda saved: [one.update(exp_avg=one["exp_avg"].bool()) for one in saved["state"].values()], "is bool"),
        (lambda saved: saved["param_groups"][0]["params"].append(77), "none of this model's"),
        (
            lambda saved: (saved["param_groups"][0]["params"].append(77), saved["state"][1].pop("exp_avg")),
            "none of this model's",
        ),
        (lambda saved: (saved.clear(), saved.update({"state.a.exp_avg": 1})), "not under numbers"),
    ],
)
def test_an_optimizer_that_cannot_be_told_by_parameter_stays_behind_with_a_word(
    tmp_path: Path, change: Any, why: str
) -> None:
    path, _ = actor(tmp_path, "llama-3", 1, flat=True)
    rewrite(path / "optim_world_size_1_rank_0.pt", change)
    (note,) = (note for note in reading_notes(open_checkpoint(path)) if "not read" in note)
    assert why in note
    conversions.run(path, tmp_path / "out", "hf")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: (path / "model_world_size_3_rank_1.pt").unlink(), "of ranks"),
        (lambda path: (path / "optim_world_size_3_rank_2.pt").unlink(), "of ranks"),
        (lambda path: shutil.copy(path / "model_world_size_3_rank_0.pt", path / "model_world_size_4_rank_3.pt"), "say"),
        (lambda path: rewrite(path / "model_world_size_3_rank_1.pt", lambda one: one.popitem()), "other names"),
        (lambda path: torch.save([1], path / "model_world_size_3_rank_0.pt"), "not what verl writes"),
    ],
)
def test_files_that_are_not_of_one_checkpoint_are_refused(tmp_path: Path, spoil: Any, why: str) -> None:
    path, _ = actor(tmp_path, "llama-3", 3)
    spoil(path)
    with pytest.raises(DamagedCheckpoint, match=why):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", ["model", "optim"])
@pytest.mark.parametrize("replicas", [1, *in_soak(2)])
def test_a_file_under_another_ranks_name_is_refused(tmp_path: Path, kind: str, replicas: int) -> None:
    """Two that changed places have all rows, in another order."""
    path, _ = actor(tmp_path, "llama-3", 2, replicas=replicas)
    one, other = (path / f"{kind}_world_size_{2 * replicas}_rank_{rank}.pt" for rank in range(2))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=f"a file that rank 1 saved.*{kind}_world_size_._rank_0"):
        open_checkpoint(path)


def test_a_mesh_of_an_older_torch_tells_its_place(tmp_path: Path) -> None:
    """Before 2.9 it has no `_rank`: of one dimension, the place is the rank."""
    path, live = actor(tmp_path, "llama-3", 2)
    for rank in range(2):
        for kind in ("model", "optim"):
            file = path / f"{kind}_world_size_2_rank_{rank}.pt"
            with zipfile.ZipFile(file) as archive:
                members = {name: archive.read(name) for name in archive.namelist()}
            (pickled,) = (name for name in members if name.endswith("data.pkl"))
            assert members[pickled].count(b"\5\0\0\0_rank") == 1
            members[pickled] = members[pickled].replace(b"\5\0\0\0_rank", b"\5\0\0\0_none")
            with zipfile.ZipFile(file, "w") as archive:
                for name, data in members.items():
                    archive.writestr(name, data)
    assert_is(path, live)
    shutil.copy(path / "model_world_size_2_rank_0.pt", path / "model_world_size_2_rank_1.pt")
    with pytest.raises(DamagedCheckpoint, match="a file that rank 0 saved.*rank_1"):
        open_checkpoint(path)


def test_a_link_to_files_of_another_directory_is_refused(tmp_path: Path) -> None:
    path, _ = actor(tmp_path, "llama-3", 1)
    (path / "huggingface").rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "LICENSE").write_text("a secret")
    (path / "huggingface").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedCheckpoint, match="huggingface.*leads out|leads out.*huggingface"):
        conversions.run(path, tmp_path / "out", "hf")


def test_a_stack_of_no_experts_is_not_left_out(tmp_path: Path) -> None:
    path, _ = actor(tmp_path, "qwen3-moe", 1)
    stack = "model.layers.1.mlp.experts.gate_up_proj"
    rewrite(path / "model_world_size_1_rank_0.pt", lambda state: state.update({stack: torch.ones(0, 4, 4)}))
    with pytest.raises(DamagedCheckpoint, match=f"`{stack}` is a stack of no experts"):
        open_checkpoint(path)


def test_a_step_is_chosen_by_its_directory(tmp_path: Path) -> None:
    path, _ = actor(tmp_path, "llama-3", 1)
    with pytest.raises(CheckpointError, match="no iterations to choose from.*a directory of its own, give that"):
        open_checkpoint(path, 4)
