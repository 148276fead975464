"""Megatron `torch` checkpoints that are damaged, incomplete or hostile: one error each, and soon."""

import argparse
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from legacy_files import ARGS, SHAPES

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.torch_legacy.reader import LegacyReader, recognise
from precisionctl.errors import CheckpointError, DamagedCheckpoint, PrecisionctlError, UnsafePickle
from precisionctl.planning.make_plan import make_plan
from precisionctl.untrusted.pickle_writer import Global, PickledObject, dumps

Change = Callable[[dict[str, Any]], object]


def content(stage: int) -> dict[str, Any]:
    model = {f"decoder.layers.0.{name}": torch.ones(shape) for name, shape in SHAPES.items()}
    if stage == 0:
        model["embedding.word_embeddings.weight"] = torch.ones(16, 8)
    else:
        model |= {"decoder.final_layernorm.weight": torch.ones(8), "output_layer.weight": torch.ones(16, 8)}
    args = argparse.Namespace(**ARGS)
    return {"args": args, "checkpoint_version": 3.0, "iteration": 3, "model": model}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Tensor 2 x pipeline 2 ranks."""
    for tensor in range(2):
        for stage in range(2):
            path = tmp_path / "iter_0000003" / f"mp_rank_{tensor:02d}_{stage:03d}"
            path.mkdir(parents=True)
            torch.save(content(stage), path / "model_optim_rng.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    return tmp_path / "iter_0000003"


def edit(directory: Path, rank: str, change: Change) -> None:
    path = directory / rank / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


def edit_all(directory: Path, change: Change) -> None:
    for rank in directory.iterdir():
        edit(directory, rank.name, change)


def test_what_is_sound_is_read(directory: Path) -> None:
    reader = LegacyReader(directory.parent)
    assert make_plan(reader, "hf").model.num_layers == 2
    assert all(read_tensor(reader, name).eq(1).all() for name in reader.specs)


def drop(name: str) -> Change:
    return lambda state: state["model"].pop(name)


def put(name: str, value: object) -> Change:
    return lambda state: state["model"].update({name: value})


def tell(**args: object) -> Change:
    return lambda state: vars(state["args"]).update(args)


QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
NORM = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"
LAST = "mp_rank_01_001"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing directory": (lambda d: shutil.rmtree(d / LAST), f"the directory {LAST} is missing .1 of 4"),
    "the last tensor ranks missing": (
        lambda d: [shutil.rmtree(d / f"mp_rank_01_00{i}") for i in (0, 1)],
        "directories of 1 tensor-parallel ranks, its arguments say 2",
    ),
    "a missing file": (lambda d: (d / LAST / "model_optim_rng.pt").unlink(), "a file is missing"),
    "a directory too many": (lambda d: shutil.copytree(d / LAST, d / "mp_rank_01_002"), "mp_rank_01_002 is not a rank"),
    "an empty file": (lambda d: (d / LAST / "model_optim_rng.pt").write_bytes(b""), "no ZIP archive"),
    "another shape": (lambda d: edit(d, LAST, put(QKV, torch.ones(12, 4))), r"12, 4\], but .*12, 8\] in mp_rank_00"),
    "another dtype": (lambda d: edit(d, LAST, put(QKV, torch.ones(12, 8).half())), "float16"),
    "a tensor on some ranks": (lambda d: edit(d, LAST, drop(QKV)), "there on 1 of 2 tensor-parallel ranks"),
    "the second linear of an MLP not on the first rank": (  # which tells how the first linear is cut
        lambda d: edit(d, "mp_rank_00_001", drop(FC2)),
        f"`decoder.layers.1.{FC2.partition('0.')[2]}` is there on 1 of 2 tensor-parallel ranks",
    ),
    "another replica": (lambda d: edit(d, LAST, put(NORM, torch.zeros(8))), "not the same as in mp_rank_00_001"),
    "more layers on a rank": (
        lambda d: edit(d, LAST, put(QKV.replace("0", "1", 1), torch.ones(12, 8))),
        r"the ranks of stage 1 hold \[1, 2\] layers",
    ),
    "no model": (lambda d: edit(d, LAST, lambda state: state.pop("model")), "it holds no model"),
    "a model that is a list": (lambda d: edit(d, LAST, lambda state: state.update(model=[1])), "it holds no model"),
    "no table": (lambda d: torch.save([1], d / LAST / "model_optim_rng.pt"), "it holds no table"),
    "text as a tensor": (lambda d: edit(d, LAST, put(QKV, "text")), "'text', not a contiguous tensor"),
    "another number of stages": (
        lambda d: edit(d, LAST, lambda state: state.update(model0=state.pop("model"), model1={})),
        "ranks with .1, 2. stages",
    ),
    "a rank with a layer more": (
        lambda d: edit(d, LAST, put(FC2.replace("layers.0", "layers.1"), torch.ones(8, 8))),
        r"the ranks of stage 1 hold \[1, 2\] layers",
    ),
    "sizes that are words": (lambda d: edit_all(d, tell(pipeline_model_parallel_size="two")), "not a number of ranks"),
    "no ranks": (
        lambda d: edit_all(d, tell(pipeline_model_parallel_size=0)),
        "pipeline_model_parallel_size is 0, not a number of ranks",
    ),
    "a billion ranks": (
        lambda d: edit_all(d, tell(expert_model_parallel_size=10**6)),
        "more ranks than there are",
    ),
    "experts in one matrix": (
        lambda d: edit_all(d, put("decoder.layers.0.mlp.experts.weight1", torch.ones(8, 8))),
        "legacy GroupedMLP",
    ),
    "a name in two spellings": (
        lambda d: edit_all(d, put("language_model.encoder.layers.0.mlp.dense_4h_to_h.weight", torch.ones(8, 8))),
        "is there twice",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_error(directory: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    damage(directory)
    with pytest.raises(DamagedCheckpoint, match=message) as error:
        reader = LegacyReader(directory.parent)
        for each in reader.specs:
            reader.chunks(each)
    assert error.value.where.startswith(str(directory.parent))


def test_a_transposed_tensor_is_named_with_what_to_do(directory: Path) -> None:
    edit(directory, LAST, put(QKV, torch.ones(8, 12).t()))
    with pytest.raises(CheckpointError, match=r"linear_qkv.weight` \[12, 8\] is stored transposed.*with .contiguous"):
        LegacyReader(directory)


@pytest.mark.parametrize("args", [{"num_layers": 10**9}, {"hidden_size": 10**9}, {"num_attention_heads": 10**9}])
def test_arguments_of_a_model_beyond_what_is_there_are_refused(directory: Path, args: dict[str, int]) -> None:
    edit_all(directory, tell(**args))
    with pytest.raises(PrecisionctlError):
        make_plan(LegacyReader(directory), "hf")


def test_a_link_out_of_the_checkpoint_is_refused(directory: Path, tmp_path: Path) -> None:
    path = directory / LAST / "model_optim_rng.pt"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedCheckpoint, match="symbolic link"):
        LegacyReader(directory)


def test_a_gadget_does_not_run(directory: Path) -> None:
    with zipfile.ZipFile(directory / LAST / "model_optim_rng.pt", "w") as file:
        file.writestr("x/data.pkl", dumps(PickledObject(Global("os", "system"), ("touch executed",)), 2))
    with pytest.raises(UnsafePickle, match="system"):
        LegacyReader(directory)


UNFIT = [7, [7], {"optimizer": {"param_groups": 7}}, {"param_groups": [{"params": [0]}], "state": {0: {}}}]


@pytest.mark.parametrize("optimizer", UNFIT)
def test_an_optimizer_that_does_not_fit_the_model_is_refused_when_it_is_asked_for(
    directory: Path, optimizer: object
) -> None:
    edit_all(directory, lambda state: state.update(optimizer=optimizer))
    reader = LegacyReader(directory)
    with pytest.raises(DamagedCheckpoint, match="optimizer"):
        _ = reader.optimizer_specs


def buffer(elements: int, **changes: object) -> dict[object, object]:
    flat = {kind: torch.zeros(elements) for kind in ("param", "exp_avg", "exp_avg_sq")}
    return {"buckets_coalesced": True, 0: {(torch.float32, torch.float32): flat | changes}}


BUFFERS = [
    7,
    {"buckets_coalesced": False},
    {"buckets_coalesced": True},
    {"buckets_coalesced": True, 0: 7},
    {"buckets_coalesced": True, 0: {"a": 7}},
    buffer(10),
    buffer(10**6),
    buffer(10, param=torch.zeros(2, 5)),
    buffer(10, exp_avg="text"),
    buffer(10) | {1: {}},
]


@pytest.mark.parametrize("saved", BUFFERS, ids=range(len(BUFFERS)))
def test_buffers_that_do_not_fit_the_model_are_refused_when_they_are_asked_for(directory: Path, saved: object) -> None:
    torch.save(saved, directory / LAST / "distrib_optim.pt")
    reader = LegacyReader(directory)
    with pytest.raises(DamagedCheckpoint, match=r"--drop-optimizer leaves"):
        _ = reader.optimizer_specs


def test_a_directory_without_a_tracker_names_what_is_there(directory: Path) -> None:
    (directory.parent / "latest_checkpointed_iteration.txt").unlink()
    assert recognise(directory.parent)
    with pytest.raises(CheckpointError, match="Complete ones: iter_0000003"):
        LegacyReader(directory.parent)
