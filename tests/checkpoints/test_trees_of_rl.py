"""What trainers for RL and post-training leave is read, from the folder of a step and from those around it.

The trees are written with torch's own calls, as the trainers' sources do: NeMo-RL at 7ea279a (native_checkpoint.py,
models/automodel/checkpoint.py), prime-rl at 559b447 (trainer/ckpt.py), AReaL at 4aef98d (fsdp_utils/checkpoint.py),
miles at 31f1ca9 (fsdp_utils/checkpoint.py), LLaMA-Factory at ff6d4d1 (distributed/fsdp2.py), SkyRL at a956457
(fsdp_strategy.py, megatron_strategy.py), EasyR1 at b44b311 (fsdp_checkpoint_manager.py), ROLL at 8eb27cc
(mcore_adapter/checkpointing.py, megatron_strategy.py) and ms-swift at 3602360 (megatron_lm_utils.py).
"""

import argparse
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import conversions
import pico
import pytest
import torch
import verl_files
from soaking import in_soak
from torch import Tensor
from trained_models import MOMENTS, config_of, moments, save, states, trained
from trainer_directories import automodel

from precisionctl.checkpoints.base import Hints, WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.hf_directory.companions import read_companions
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.torch_files.dcp_metadata import Index, read_index, write_index
from precisionctl.commands.source_notes import reading_notes
from precisionctl.errors import UnknownFormat

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def run() -> tuple[Any, Any]:
    return trained("llama-3")


def tokenizer(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_text('{"its": "own"}')


def nemo_rl(run: Path, model: Any, optimizer: Any) -> None:
    step, both = run / "step_7", states(model, optimizer)
    save(step / "policy" / "weights", {"model": both["model"]})
    save(step / "policy" / "optimizer", {"optim": {"optim": both["optimizer"], "sched": {"last_epoch": 2}}})
    tokenizer(step / "policy" / "tokenizer")
    torch.save({}, step / "train_dataloader.pt")


def nemo_rl_with_automodel(run: Path, model: Any, optimizer: Any) -> None:
    policy = run / "step_7" / "policy"
    automodel(policy / "weights", model, optimizer)
    shutil.rmtree(policy / "weights" / "published")
    (policy / "optimizer").mkdir()
    (policy / "weights" / "optim").rename(policy / "optimizer" / "optim")
    tokenizer(policy / "tokenizer")


def prime_rl(run: Path, model: Any, optimizer: Any) -> None:
    both = states(model, optimizer)
    app = {"model": both["model"], "optimizers": both["optimizer"], "progress": {"step": 7, "total_tokens": 9}}
    save(run / "checkpoints" / "step_7" / "trainer", {"app": app})
    (run / "checkpoints" / "step_7" / "orchestrator").mkdir()
    torch.save({}, run / "checkpoints" / "step_7" / "orchestrator" / "progress.pt")


def areal(run: Path, model: Any, optimizer: Any) -> None:
    both = states(model, optimizer)
    save(run / "recover_checkpoint", {"dcp": {"model": both["model"], "optim": both["optimizer"]}})


def miles(run: Path, model: Any, optimizer: Any) -> None:
    step, both = run / "iter_0000007", states(model, optimizer)
    save(step / "model", {"model_state": {"model": both["model"]}})
    save(step / "optimizer", {"optim_state": {"optim": both["optimizer"]}})
    save(step / "lr_scheduler", {"lr_scheduler_state": {"lr_scheduler": {"last_epoch": 2}}})
    torch.save({}, step / "rng.pt")
    (run / "latest_checkpointed_iteration.txt").write_text("7")


def llama_factory(run: Path, model: Any, optimizer: Any) -> None:
    both = states(model, optimizer)
    save(run / "checkpoint-7" / "model", both["model"])
    save(run / "checkpoint-7" / "optimizer", both["optimizer"])
    torch.save({}, run / "checkpoint-7" / "scheduler.pt")


def skyrl(run: Path, model: Any, optimizer: Any) -> None:
    kept = {kind: moments(model, optimizer, kind) for kind in MOMENTS}
    weights = {name: one.detach() for name, one in model.named_parameters()}
    policy = verl_files.save(run / "global_step_7" / "policy", weights, kept, 2, step=2)
    config_of(model, policy / "huggingface")
    torch.save({}, run / "global_step_7" / "trainer_state.pt")


SAVED = {
    nemo_rl: ("step_7/policy", 7),
    nemo_rl_with_automodel: ("step_7/policy", 7),
    prime_rl: ("checkpoints/step_7/trainer", 7),
    areal: ("recover_checkpoint", 2),
    miles: ("iter_0000007", 2),
    llama_factory: ("checkpoint-7", 7),
    skyrl: ("global_step_7/policy", 7),
}
"""What a run leaves; where that is, and its iteration: Adam's count, where no folder is named after a step of RL."""


@pytest.mark.parametrize(
    "trainer", [nemo_rl, prime_rl, llama_factory, *in_soak(nemo_rl_with_automodel, areal, miles, skyrl)]
)
def test_weights_and_moments_of_a_run_are_read_from_its_step_and_from_any_folder_around_it(
    tmp_path: Path, trainer: Callable[[Path, Any, Any], None], run: tuple[Any, Any]
) -> None:
    model, optimizer = run
    trainer(tmp_path / "run", model, optimizer)
    reference = config_of(model, tmp_path / "hf")
    hints = Hints(companions=read_companions(reference), reference=reference)
    inside, iteration = SAVED[trainer]
    live = {name: one.detach() for name, one in model.named_parameters()}
    for kind in MOMENTS:
        live |= {f"optimizer.state.{kind}.{name}": one for name, one in moments(model, optimizer, kind).items()}
    place = tmp_path / "run" / inside
    while place != tmp_path:
        reader: Any = open_checkpoint(place, None, hints)
        assert (reader.path, reader.iteration) == (tmp_path / "run" / inside, iteration)
        assert (reader.trainer_run.updates, reader.model.architecture) == (2, "llama")
        both = WithOptimizer(reader)
        assert both.specs.keys() == live.keys()
        assert [name for name, one in live.items() if not torch.equal(read_tensor(both, name), one)] == []
        place = place.parent


def test_the_tokenizer_of_nemo_rl_is_its_own_beside_a_reference(tmp_path: Path, run: tuple[Any, Any]) -> None:
    model, optimizer = run
    nemo_rl(tmp_path, model, optimizer)
    reference = config_of(model, tmp_path / "hf")
    (reference / "tokenizer.json").write_text('{"of the": "reference"}')
    reader = open_checkpoint(tmp_path / "step_7", None, Hints(companions=read_companions(reference)))
    assert reader.companions.files["tokenizer.json"] == b'{"its": "own"}'
    nemo_rl_with_automodel(tmp_path / "v2", model, optimizer)
    files = open_checkpoint(tmp_path / "v2").companions.files
    assert files["tokenizer.json"] == b'{"its": "own"}' and "config.json" in files


def test_of_several_steps_or_models_none_is_taken(tmp_path: Path, run: tuple[Any, Any]) -> None:
    model, optimizer = run
    for step in ("step_7", "step_8"):
        nemo_rl(tmp_path / step, model, optimizer)
        (tmp_path / step / "step_7").rename(tmp_path / step / "x")
        (tmp_path / step / "x" / "policy").rename(tmp_path / step / "policy")
    with pytest.raises(UnknownFormat, match="Give one of them, the newest for instance: .*/step_8"):
        open_checkpoint(tmp_path)
    shutil.copytree(tmp_path / "step_8" / "policy", tmp_path / "step_8" / "model")
    with pytest.raises(UnknownFormat, match="a folder with a model in it"):
        open_checkpoint(tmp_path / "step_8")


def test_an_optimizer_of_easyr1_goes_by_its_names_in_whatever_order_they_are(
    tmp_path: Path, run: tuple[Any, Any]
) -> None:
    """Its states have the parameters' names, as get_state_dict gives them, and a group may list these otherwise."""
    model, optimizer = run
    skyrl(tmp_path, model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    for path in (tmp_path / "global_step_7" / "policy").glob("optim_*"):
        state = torch.load(path, weights_only=False)
        state["state"] = {names[number]: one for number, one in state["state"].items()}
        state["param_groups"][0]["params"] = sorted(names, reverse=True)
        torch.save(state, path)
    both = WithOptimizer(open_checkpoint(tmp_path / "global_step_7"))  # type: ignore[arg-type]
    for name, one in moments(model, optimizer, "exp_avg_sq").items():
        assert torch.equal(read_tensor(both, f"optimizer.state.exp_avg_sq.{name}"), one)


# Of Megatron


def iteration(tmp_path: Path, run: tuple[Any, Any]) -> tuple[Path, Mapping[str, Tensor], Mapping[str, Any]]:
    """A `torch_dist` of a run with an optimizer, its tensors, and its common data."""
    model, optimizer = run
    config_of(model, save(tmp_path / "saved", states(model, optimizer)))
    conversions.run(tmp_path / "saved", tmp_path / "made", "megatron", "bf16")
    made = tmp_path / "made" / "iter_0000002"
    reader = WithOptimizer(TorchDistReader(made))
    live = {name: read_tensor(reader, name) for name in reader.specs}
    shutil.rmtree(made / "precisionctl")
    return made, live, torch.load(made / "common.pt", weights_only=False)


def assert_holds(path: Path, live: Mapping[str, Tensor], hints: Hints | None = None) -> TorchDistReader:
    reader = open_checkpoint(path, None, hints or Hints())
    assert isinstance(reader, TorchDistReader) and reader.model.architecture == "llama"
    both = WithOptimizer(reader)
    assert both.specs.keys() == live.keys()
    assert [name for name, one in live.items() if not torch.equal(read_tensor(both, name), one)] == []
    assert reader.common["optimizer"]["optimizer"]["param_groups"]
    return reader


def test_skyrls_megatron_has_its_config_inside_and_its_step_above(tmp_path: Path, run: tuple[Any, Any]) -> None:
    made, live, common = iteration(tmp_path, run)
    policy = tmp_path / "run" / "global_step_7" / "policy"
    shutil.copytree(made, policy)
    torch.save({"optimizer": common["optimizer"], "lr_scheduler": {}, "rng": {}}, policy / "common.pt")
    shutil.copytree(made, policy.parent / "critic")
    pico.save(tmp_path / "hf", "llama-3")
    (policy / "huggingface").mkdir()
    shutil.copy(tmp_path / "hf" / "config.json", policy / "huggingface")
    for path in (policy, policy.parent, tmp_path / "run"):
        assert assert_holds(path, live).iteration == 7


def test_rolls_model_and_optimizer_are_beside_each_other_in_an_iteration_that_is_always_the_first(
    tmp_path: Path, run: tuple[Any, Any]
) -> None:
    made, live, common = iteration(tmp_path, run)
    step = tmp_path / "run" / "checkpoint-7"
    for name in ("dist_model", "dist_optimizer"):
        shutil.copytree(made, step / "iter_0000001" / name)
    for name, content in (("dist_model", {}), ("dist_optimizer", dict(common["optimizer"]))):
        keep_only(step / "iter_0000001" / name, optimizer=name == "dist_optimizer")
        torch.save(content, step / "iter_0000001" / name / "common.pt")
    (step / "latest_checkpointed_iteration.txt").write_text("1")
    torch.save({}, step / "scheduler.pt")
    pico.save(tmp_path / "hf", "llama-3")
    hints = Hints(companions=read_companions(tmp_path / "hf"), reference=tmp_path / "hf")
    for path in (step / "iter_0000001", step, tmp_path / "run"):
        assert assert_holds(path, live, hints).iteration == 7


def keep_only(directory: Path, *, optimizer: bool) -> None:
    index = read_index(directory)
    tensors = {key: one for key, one in index.tensors.items() if key.startswith("optimizer.") == optimizer}
    (directory / ".metadata").unlink()
    write_index(directory, Index(tensors, {}))


def test_ms_swift_has_no_model_in_its_arguments_and_a_config_beside_its_iteration(
    tmp_path: Path, run: tuple[Any, Any]
) -> None:
    made, live, common = iteration(tmp_path, run)
    step = tmp_path / "v0" / "checkpoint-7"
    shutil.copytree(made, step / "iter_0000007")
    of_training = argparse.Namespace(
        micro_batch_size=1, tensor_model_parallel_size=1, lr=1e-4, bf16=True, fp8_format=None
    )
    torch.save({**common, "args": of_training, "iteration": 7}, step / "iter_0000007" / "common.pt")
    (step / "latest_checkpointed_iteration.txt").write_text("7")
    (step / "args.json").write_text("{}")
    pico.save(tmp_path / "hf", "llama-3")
    hints = Hints(companions=read_companions(tmp_path / "hf"), reference=tmp_path / "hf")
    for path in (step / "iter_0000007", step, tmp_path / "v0"):
        assert assert_holds(path, live, hints).iteration == 7
    for file in (tmp_path / "hf").iterdir():
        shutil.copy(file, step)
    assert assert_holds(step / "iter_0000007", live).iteration == 7
    assert any("give its iter_*" in note for note in reading_notes(open_checkpoint(step)))
