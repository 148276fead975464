"""A run's optimizer, schedule and generators, from Megatron to Megatron."""

from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import carry_out

from precisionctl.checkpoints.base import WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor, write_rows
from precisionctl.checkpoints.megatron.carried_run import CarriedRun
from precisionctl.checkpoints.megatron.keys import write_tracker
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.torch_dist.writer import TorchDistWriter
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.dtypes import DType
from precisionctl.errors import RecipeError, UnknownArchitecture
from precisionctl.param import Parallelism, TensorSpec
from precisionctl.verify.compare import compare

SCHEDULE = {"max_lr": 1e-3, "num_steps": 70, "lr_decay_style": "cosine"}
SETTINGS = {
    "optimizer": {"state": {"common_step": 7}, "param_groups": [{"lr": 1e-3, "wd_mult": 1.0, "betas": (0.9, 0.95)}]}
}
GENERATORS = [{"torch_rng_state": [1, 2, 3]}]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run with a plain optimizer leaves at iteration 7, cut for 1 x 1 ranks."""
    top = tmp_path_factory.mktemp("run")
    pico.save(top / "hf", dtype=torch.bfloat16)
    execute(plan_command(Request(top / "hf", top / "weights", "megatron")))
    weights = TorchDistReader(top / "weights")
    plan = plan_command(Request(top / "hf", top / "unused", "megatron")).plan
    specs = dict(plan.targets)
    for name, spec in plan.targets.items():
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            specs[f"optimizer.state.{kind}.{name}"] = TensorSpec(spec.shape, DType.float32, spec.parallel)
    writer = TorchDistWriter(
        top / "run" / "iter_0000007",
        weights.model,
        specs,
        run=CarriedRun(
            iteration=7,
            common={
                "optimizer": SETTINGS,
                "opt_param_scheduler": SCHEDULE,
                "num_floating_point_operations_so_far": 123,
            },
            args={"consumed_train_samples": 560, "lr": 1e-3},
            objects={"rng_state/shard_0.0_1.1": GENERATORS},
        ),
    )
    writer.lay_out()
    torch.manual_seed(0)
    for name, spec in specs.items():
        values = torch.randn(spec.rows, spec.columns) if name.startswith("optimizer.") else read_tensor(weights, name)
        write_rows(writer, name, 0, values)
    writer.finish(None)
    write_tracker(top / "run", 7)
    return top / "run"


def convert(source: Path, destination: Path, **options: Any) -> tuple[TorchDistReader, tuple[str, ...]]:
    work = carry_out(Request(source, destination, "megatron", **options), verify=True)
    return TorchDistReader(destination), work.notes


def assert_same(a: TorchDistReader, b: TorchDistReader) -> None:
    left, right = WithOptimizer(a), WithOptimizer(b)
    assert left.specs.keys() == right.specs.keys()
    for name in left.specs:
        assert torch.equal(read_tensor(left, name), read_tensor(right, name)), name


def test_a_run_goes_to_other_ranks_and_back(tmp_path: Path, trained: Path) -> None:
    cut, notes = convert(trained, tmp_path / "cut", parallelism=Parallelism(2))
    assert cut.path.name == "iter_0000007" and cut.iteration == 7
    inner: Any = SETTINGS["optimizer"]
    counted = inner | {"param_groups": [group | {"step": 7} for group in inner["param_groups"]]}
    found = {"optimizer": counted, "param_state_sharding_type": "fully_reshardable"}  # for either of Megatron's
    assert cut.common["opt_param_scheduler"] == SCHEDULE and cut.common["optimizer"] == found
    assert cut.common["num_floating_point_operations_so_far"] == 123
    assert (cut.args["consumed_train_samples"], cut.args["tensor_model_parallel_size"]) == (560, 2)
    assert cut.args["no_save_optim"] is False and cut.args["no_save_rng"] is True
    assert not [key for key in cut.objects if key.startswith("rng_state")]
    assert any("rng_state" in note for note in notes)
    back, _ = convert(tmp_path / "cut", tmp_path / "back")
    assert_same(back, TorchDistReader(trained))


def test_the_same_ranks_keep_their_generators(tmp_path: Path, trained: Path) -> None:
    kept, notes = convert(trained, tmp_path / "kept")
    assert kept.read_object("rng_state/shard_0.0_1.1") == GENERATORS
    assert kept.args["no_save_rng"] is False
    assert not any("rng_state" in note for note in notes)


def test_an_optimizer_can_be_left_behind(tmp_path: Path, trained: Path) -> None:
    weights, notes = convert(trained, tmp_path / "weights", drop_optimizer=True)
    assert weights.path.name == "release" and not weights.optimizer_specs
    assert any("optimizer stays behind" in note for note in notes)
    work = carry_out(Request(trained, tmp_path / "hf", "hf"))
    assert any("optimizer stays behind" in note for note in work.notes)


def test_a_checkpoint_without_a_family_is_taken_for_one_and_told_otherwise(tmp_path: Path, trained: Path) -> None:
    guessed = plan_command(Request(trained, tmp_path / "out", "hf"))
    assert guessed.plan.model.architecture == "llama"
    assert any("taken for llama" in note and "mistral" in note for note in guessed.notes)
    told = plan_command(Request(trained, tmp_path / "out", "hf", architecture="mistral"))
    assert told.plan.model.architecture == "mistral"
    assert not any("taken for" in note for note in told.notes)
    with pytest.raises(UnknownArchitecture, match="do not describe gpt2: they fit llama"):
        plan_command(Request(trained, tmp_path / "out", "hf", architecture="gpt2"))


def test_a_reference_gives_what_megatron_has_no_place_for(tmp_path: Path, trained: Path) -> None:
    hf = trained.parent / "hf"
    execute(plan_command(Request(trained, tmp_path / "out", "hf", reference=hf)))
    assert compare(open_checkpoint(hf), open_checkpoint(tmp_path / "out")).equal
    assert open_checkpoint(tmp_path / "out").model.vocab_size == pico.SIZES["vocab_size"]
    again = plan_command(Request(trained.parent / "weights", tmp_path / "again", "hf", reference=hf))
    assert again.reader.companions == open_checkpoint(trained.parent / "weights").companions


@pytest.mark.parametrize("sizes", [Parallelism(), Parallelism(2, 2), Parallelism(1, 2)], ids=str)
def test_a_run_goes_to_rank_directories_and_back(tmp_path: Path, trained: Path, sizes: Parallelism) -> None:
    cut = plan_command(Request(trained, tmp_path / "cut", "megatron", container="torch", parallelism=sizes))
    execute(cut, verify=True)
    assert len(list((tmp_path / "cut" / "iter_0000007").glob("mp_rank_*"))) == sizes.tensor * sizes.pipeline
    back, _ = convert(tmp_path / "cut", tmp_path / "back")
    assert_same(back, TorchDistReader(trained))
    assert back.common["opt_param_scheduler"] == SCHEDULE
    assert back.args["consumed_train_samples"] == 560


def test_a_container_of_another_layout_is_refused() -> None:
    with pytest.raises(RecipeError, match="Known: safetensors, bin"):
        Request(Path("a"), Path("b"), "hf", container="torch")
