"""What changes from Megatron to Megatron: the rows that a vocabulary is padded to, and what has no place."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pico
import pytest
import torch
from conversions import carry_out, change_args, run
from hypothesis import given, strategies as st
from mcore_runs import VOCABULARY, trained
from soaking import in_soak
from torch import Tensor

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.megatron.carried_run import CarriedRun
from precisionctl.checkpoints.megatron.directory import MegatronReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.dtypes import DType
from precisionctl.errors import CheckpointError, DamagedCheckpoint, MappingError, ShapeMismatch
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import Parallelism, TensorSpec
from precisionctl.planning.make_plan import make_plan


@given(st.integers(1, 300_000), st.sampled_from([1, 8, 64, 100, 128]), st.sampled_from([1, 2, 3, 8, 64]))
def test_the_size_is_the_one_that_megatron_computes(size: int, divisible_by: int, ranks: int) -> None:
    model = ModelShape("llama", 1, 2, 4, 1, 1, 2, size, size, 8, divisible_by)
    multiple = divisible_by * ranks
    assert model.padded(ranks).padded_vocab_size == int(math.ceil(size / multiple) * multiple)


@given(st.integers(1, 300_000), st.sampled_from([1, 2, 3, 5]), st.sampled_from([1, 2, 4, 8]))
def test_a_padded_size_padded_for_more_ranks_is_the_size_padded_for_them(size: int, ranks: int, more: int) -> None:
    padded = ModelShape("llama", 1, 2, 4, 1, 1, 2, size, size, 8).padded(ranks).padded_vocab_size
    of_padded = ModelShape("llama", 1, 2, 4, 1, 1, 2, padded, padded, 8).padded(ranks * more)
    expected = int(math.ceil(size / (128 * ranks * more)) * 128 * ranks * more)
    assert of_padded.padded_vocab_size == expected


def convert(
    source: Path, destination: Path, container: str, **sizes: int
) -> tuple[MegatronReader, dict[str, Tensor], tuple[str, ...]]:
    """What is there afterwards, and what was told."""
    asked = Request(source, destination, "megatron", container=container, parallelism=Parallelism(**sizes))
    work = carry_out(asked, verify=True)
    reader: Any = open_checkpoint(destination)
    specs = {**reader.specs, **reader.optimizer_specs}
    both = SimpleNamespace(specs=specs, chunks=reader.chunks)
    return reader, {name: read_tensor(both, name) for name in specs}, work.notes


# rows are added before either container is written
@pytest.mark.parametrize("container", ["torch_dist", *in_soak("torch")])
def test_more_ranks_get_more_rows_of_zeros_and_fewer_get_the_first(tmp_path: Path, container: str) -> None:
    _, before = trained(tmp_path)
    reader, wide, told = convert(tmp_path / "run", tmp_path / "wide", container, tensor=4)
    assert reader.args["padded_vocab_size"] == 512
    assert "The vocabulary is padded to 512 rows, as Megatron pads it for this --tp; the source has 256." in told
    for name, values in before.items():
        if name.endswith(VOCABULARY):
            assert wide[name].shape == (512, *values.shape[1:])
            assert torch.equal(wide[name][:256], values) and not wide[name][256:].any(), name
        else:
            assert torch.equal(wide[name], values), name
    reader, again, told = convert(tmp_path / "wide", tmp_path / "again", "torch_dist")
    assert reader.args["padded_vocab_size"] == 256
    assert again.keys() == before.keys()
    for name, values in before.items():
        assert torch.equal(again[name], values), name
    _, _, told = convert(tmp_path / "again", tmp_path / "same", container)
    assert not any("padded" in note for note in told)


@pytest.mark.parametrize("said", [50, 7])
def test_padding_that_goes_is_said_to_go(tmp_path: Path, said: int) -> None:
    """By the arguments of a checkpoint that Megatron saved, whose tokenizer says how many tokens there are."""
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "run", "megatron")
    shutil.rmtree(tmp_path / "run" / "release" / "precisionctl" / "hf")
    change_args(tmp_path / "run" / "release", vocab_size=said)
    note = f"The vocabulary has {said} rows: the {256 - said} of Megatron's padding are left out."
    assert note in plan_command(Request(tmp_path / "run", tmp_path / "out", "hf")).notes
    assert note in plan_command(Request.export(tmp_path / "run", tmp_path / "out", "vllm", "dynamic")).notes


def test_more_tokens_than_the_embedding_has_rows_are_refused(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "run", "megatron")
    shutil.rmtree(tmp_path / "run" / "release" / "precisionctl" / "hf")
    change_args(tmp_path / "run" / "release", vocab_size=257)
    with pytest.raises(DamagedCheckpoint, match="vocab_size is 257, and the embedding has 256 rows"):
        plan_command(Request(tmp_path / "run", tmp_path / "out", "hf"))


def test_the_runs_own_divisor_stays(tmp_path: Path) -> None:
    trained(tmp_path)
    common = tmp_path / "run" / "iter_0000003" / "common.pt"
    content = torch.load(common, weights_only=False)
    content["args"].make_vocab_size_divisible_by = 50
    torch.save(content, common)
    reader, tensors, _ = convert(tmp_path / "run", tmp_path / "out", "torch", tensor=4)
    assert reader.args["make_vocab_size_divisible_by"] == 50
    assert {len(tensors[name]) for name in VOCABULARY} == {400}


def test_rows_are_not_cut_where_nobody_says_how_many_tokens_there_are(tmp_path: Path) -> None:
    _, before = trained(tmp_path)
    convert(tmp_path / "run", tmp_path / "wide", "torch", tensor=4)
    for file in (tmp_path / "wide").rglob("model_optim_rng.pt"):
        content = torch.load(file, weights_only=False)
        content["args"].vocab_size = None  # as Megatron has it, unless told
        torch.save(content, file)
    for companion in (tmp_path / "wide").rglob("config.json"):
        companion.unlink()
    reader, tensors, _ = convert(tmp_path / "wide", tmp_path / "out", "torch_dist")
    assert {len(tensors[name]) for name in VOCABULARY} == {512}
    assert all(torch.equal(tensors[name][:256], before[name]) for name in VOCABULARY)


def test_optimizer_states_of_another_shape_than_their_parameter_are_refused(tmp_path: Path) -> None:
    source, _ = trained(tmp_path)
    name = f"optimizer.state.exp_avg.{VOCABULARY[0]}"
    wrong = SimpleNamespace(
        path=source.path,
        layout="megatron",
        model=source.model,
        specs=source.specs,
        optimizer_specs={name: TensorSpec((250, 64), DType.float32)},
    )
    with pytest.raises(ShapeMismatch, match="exp_avg.*the model's sizes say"):
        make_plan(wrong, "megatron", optimizer=True)


def test_muons_state_has_no_known_place_in_rank_files_and_stays_in_torch_dist(tmp_path: Path) -> None:
    _, before = trained(tmp_path, kinds=("momentum_buffer", "param"))
    _, after, _ = convert(tmp_path / "run", tmp_path / "dist", "torch_dist")
    assert any("momentum_buffer" in name for name in after)
    assert all(torch.equal(after[name], values) for name, values in before.items())
    with pytest.raises(MappingError, match=r"momentum_buffer.* not Adam's.*--drop-optimizer"):
        convert(tmp_path / "run", tmp_path / "torch", "torch")
    assert not list(tmp_path.glob("torch*"))


@pytest.mark.parametrize("container", ["torch_dist", "torch"])
def test_generators_go_along_where_there_is_a_place_for_them_and_a_run_is_told_where_not(
    tmp_path: Path, container: str
) -> None:
    trained(tmp_path, CarriedRun(objects={"rng_state/shard_0.0_1.1": {"torch_rng_state": torch.get_rng_state()}}))
    reader, _, told = convert(tmp_path / "run", tmp_path / "out", container)
    kept = container == "torch_dist"
    assert ("rng_state/shard_0.0_1.1" in reader.objects) == kept
    assert reader.args["no_save_rng"] == (not kept)
    assert any("rng_state" in note for note in told) == any("--no-load-rng" in note for note in told) == (not kept)


def test_muons_momentum_goes_along_beside_adams_moments_and_not_where_its_use_is_unknown(
    tmp_path: Path,
) -> None:
    _, before = trained(tmp_path, muon=True)
    reader, after, _ = convert(tmp_path / "run", tmp_path / "cut", "torch_dist", tensor=2)
    assert any(".momentum_buffer." in name for name in before)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    muon, adam = reader.common["optimizer"].values()
    assert muon["optimizer"]["param_groups"][0]["momentum_beta"] == 0.95
    assert adam["optimizer"]["param_groups"][0]["lr"] == 0.1
    for to in ("dcp", "deepspeed-universal"):
        with pytest.raises(CheckpointError, match=r"Muon.*--drop-optimizer"):
            carry_out(Request(tmp_path / "run", tmp_path / to, "hf", container=to))
