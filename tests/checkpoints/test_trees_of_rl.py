"""What trainers for RL and post-training leave is read, from the folder of a step and from those around it.

The trees are written with torch's own calls, as the trainers' sources do: NeMo-RL at 7ea279a (native_checkpoint.py,
models/automodel/checkpoint.py), prime-rl at 559b447 (trainer/ckpt.py), AReaL at 4aef98d (fsdp_utils/checkpoint.py),
miles at 31f1ca9 (fsdp_utils/checkpoint.py), LLaMA-Factory at ff6d4d1 (distributed/fsdp2.py), SkyRL at a956457
(fsdp_strategy.py, megatron_strategy.py), EasyR1 at b44b311 (fsdp_checkpoint_manager.py), ROLL at 8eb27cc
(mcore_adapter/checkpointing.py, megatron_strategy.py) and ms-swift at 3602360 (megatron_lm_utils.py).
"""

import argparse
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from precisionctl.errors import CheckpointError, DamagedCheckpoint, UnknownFormat

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
    with pytest.raises(DamagedCheckpoint, match="--reference and --trust-reference"):
        assert open_checkpoint(step, None, hints).model
    for path in (step / "iter_0000007", step):
        assert assert_holds(path, live, replace(hints, trust_reference=True)).iteration == 7
    # Megatron's defaults are biases, which this family has none of
    how = {"reference": tmp_path / "hf", "trust_reference": True}
    conversions.run(step, tmp_path / "back", "hf", container="dcp", **how)
    assert conversions.tensors(tmp_path / "back").keys() == conversions.tensors(tmp_path / "hf").keys()
    with pytest.raises(UnknownFormat, match="Give one of them, the newest for instance: .*/checkpoint-7"):
        open_checkpoint(tmp_path / "v0")


def test_ms_swifts_megatron_fsdp_has_no_model_in_its_arguments_either(tmp_path: Path, run: tuple[Any, Any]) -> None:
    """Of 4.6.0 (megatron_fsdp_checkpoint.py): a DCP, whose names megatron-core 0.16.1 gives."""
    made, live, _ = iteration(tmp_path, run)
    step = tmp_path / "v0" / "checkpoint-7"
    of_training = argparse.Namespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, lr=1e-4)
    state: dict[str, Any] = {"args": of_training, "checkpoint_version": 3.0, "iteration": 7}
    for name in TorchDistReader(made).specs:
        parts = live[name].chunk(2) if "fc1.weight" in name else [live[name]]
        for end, part in zip(("_w", "_v") if len(parts) == 2 else ("",), parts, strict=True):
            state[f"model.module.{name}{end}"] = part.contiguous()
    save(step / "iter_0000007", state)
    (step / "latest_checkpointed_iteration.txt").write_text("7")
    pico.save(tmp_path / "hf", "llama-3")
    hints = Hints(companions=read_companions(tmp_path / "hf"), reference=tmp_path / "hf")
    with pytest.raises(DamagedCheckpoint, match="--reference and --trust-reference"):
        assert open_checkpoint(step, None, hints).model
    reader: Any = open_checkpoint(step, None, replace(hints, trust_reference=True))
    assert (reader.container, reader.model.architecture, reader.iteration) == ("fsdp_dtensor", "llama", 7)
    assert [name for name in reader.specs if not torch.equal(read_tensor(reader, name), live[name])] == []


def test_nemo_rls_megatron_has_its_step_above_iterations_that_are_all_0(tmp_path: Path, run: tuple[Any, Any]) -> None:
    made, live, common = iteration(tmp_path, run)
    inside = tmp_path / "run" / "step_7" / "policy" / "weights"
    shutil.copytree(made.parent, inside)
    (inside / made.name).rename(inside / "iter_0000000")
    torch.save({**common, "iteration": 0}, inside / "iter_0000000" / "common.pt")
    (inside / "latest_checkpointed_iteration.txt").write_text("0")
    for path in (inside / "iter_0000000", inside, inside.parent, inside.parent.parent, tmp_path / "run"):
        assert assert_holds(path, live).iteration == 7
    # A fresh start, such as Megatron-Bridge's import of the checkpoint that it lies in, is none of that step
    shutil.copytree(inside, tmp_path / "checkpoint-1000" / "megatron")
    assert open_checkpoint(tmp_path / "checkpoint-1000" / "megatron").iteration == 0


def test_a_release_in_the_folder_of_a_step_has_none(
    tmp_path: Path, run: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pico.save(tmp_path / "hf", "llama-3")
    conversions.run(tmp_path / "hf", tmp_path / "step_7" / "policy" / "weights", "megatron", "bf16")
    monkeypatch.chdir(tmp_path / "step_7" / "policy" / "weights" / "release")
    assert open_checkpoint(Path()).iteration is None
    assert open_checkpoint(tmp_path / "step_7" / "policy" / "weights").iteration is None


# What looks like a tree and is none


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, run: tuple[Any, Any]) -> Path:
    """What wrong trees are made of: PyTorch's checkpoints of a model with its optimizer and of each alone, a whole
    model, a `torch_dist`, its beginning, and files of other formats."""
    made, (model, optimizer) = tmp_path_factory.mktemp("parts"), run
    both = states(model, optimizer)
    save(made / "both", both)
    save(made / "model", {"model": both["model"]})
    save(made / "optim", {"optim": both["optimizer"]})
    model.save_pretrained(made / "whole")
    shutil.copytree(made / "whole", made / "of hf")
    conversions.run(made / "whole", made / "converted", "megatron", "bf16")
    shutil.copytree(made / "converted" / "release", made / "torch_dist")
    shutil.copytree(made / "torch_dist", made / "half")
    (made / "half" / "metadata.json").unlink()
    (made / "empty").mkdir()
    config_of(model, made / "hf")
    return made


def lay(parts: Path, where: Path, tree: Mapping[str, str]) -> None:
    """A tree of these parts; what is none of them is a file's content."""
    for name, part in tree.items():
        if (parts / part).is_dir():
            shutil.copytree(parts / part, where / name)
        else:
            (where / name).parent.mkdir(parents=True, exist_ok=True)
            (where / name).write_text(part)


POLICY = {"step_7/policy/weights": "model", "step_7/policy/optimizer": "optim"}

NO_TREE: dict[str, tuple[Mapping[str, str], str]] = {
    # as fine-tuning leaves them
    "a step and the best": ({"checkpoint-10": "whole", "best": "whole"}, "Give one of them.*/checkpoint-10"),
    "one step alone": ({"checkpoint-10": "whole"}, "Give one of them.*/checkpoint-10"),
    "a step and Meta's file": ({"checkpoint-10": "whole", "consolidated.00.pth": "x"}, "params.json"),
    "a step and NeMo 1": ({"x.nemo": "x", "final": "whole"}, "Give .*x.nemo"),
    "a file and a model": ({"last.ckpt": "x", "hf": "whole"}, "Give .*/hf"),
    # a tree of the table, and something beside it
    "another step": ({**POLICY, "step_8": "empty"}, "newest for instance: .*/step_8"),
    "a merged model beside": ({**POLICY, "merged": "whole"}, "Give one of them"),
    "an adapter beside": ({**POLICY, "step_7/lora/adapter_model.safetensors": "x"}, "Give one of them"),
    "hqq's file in the step": ({**POLICY, "step_7/qmodel.pt": "x"}, "Give one of them"),
    "another model in the policy": ({**POLICY, "step_7/policy/model": "whole"}, "Give one of them"),
    "another model deeper": ({**POLICY, "out/of/it/model.gguf": "x"}, "Give one of them"),
    "a link beside": ({**POLICY, "latest": "->step_7"}, "Give one of them"),
    "an optimizer by another name": ({"step_7/model": "model", "step_7/optimizers": "optim"}, "Give one of them"),
    "no optimizer": ({"step_7/policy/weights": "model"}, "Give one of them"),
    "a file for an optimizer": ({**POLICY, "step_7/policy/optimizer": "x"}, "Give one of them"),
    "folders between": ({f"step_7/more/{name[7:]}": part for name, part in POLICY.items()}, "Give one of them"),
    # of Megatron's
    "a whole critic": (
        {"global_step_7/policy": "half", "global_step_7/critic": "torch_dist", "global_step_7/ref": "torch_dist"},
        "Give one of them",
    ),
    "an export beside": ({"checkpoint-500": "whole", "export": "torch_dist"}, "no latest_checkpointed_iteration"),
    "a reference beside": ({"step_7": "both", "reference": "torch_dist"}, "no latest_checkpointed_iteration"),
    "iterations, one half": ({"iter_0000002": "torch_dist", "iter_0000004": "half"}, "no latest_checkpointed_it"),
}
"""Folders in which several checkpoints could be meant, or no trainer's: what they have, and what is said."""


@pytest.mark.parametrize("name", NO_TREE)
def test_what_is_no_trainers_tree_or_has_more_in_it_is_not_opened(tmp_path: Path, parts: Path, name: str) -> None:
    tree, said = NO_TREE[name]
    lay(parts, tmp_path, {place: part for place, part in tree.items() if not part.startswith("->")})
    for place, part in tree.items():
        if part.startswith("->"):
            (tmp_path / place).symlink_to(part[2:])
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(tmp_path, None, Hints(companions=read_companions(parts / "hf")))
    assert re.search(said, str(refused.value)), str(refused.value)


@pytest.mark.parametrize(
    "tree",
    [
        {"model": "model", "optim": "optim", "optimizer": "optim"},
        {"weights": "model", "optimizer": "optim", "model": "model", "optim": "optim"},
        {"model": "model", "optim": "x", "optimizer.pt": "x"},
    ],
    ids=["two optimizers", "two models", "a file for an optimizer"],
)
def test_a_step_with_two_pairs_or_none_is_not_opened(tmp_path: Path, parts: Path, tree: Mapping[str, str]) -> None:
    lay(parts, tmp_path / "step_7", tree)
    with pytest.raises(UnknownFormat, match="a folder with a model in it"):
        open_checkpoint(tmp_path / "step_7", None, Hints(companions=read_companions(parts / "hf")))


def test_the_tracker_of_a_run_goes_before_folders_that_are_in_trees(tmp_path: Path, parts: Path) -> None:
    lay(parts, tmp_path, dict.fromkeys(["iter_0000000", "iter_0000002", "policy"], "torch_dist"))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert open_checkpoint(tmp_path).path == tmp_path / "iter_0000002"


@pytest.mark.parametrize(
    ("tree", "given", "step"),
    [
        ({"step_3/sub/global_step_100": "both"}, "step_3/sub/global_step_100", 2),
        ({"checkpoint-3/copy": "both"}, "checkpoint-3/copy", 2),
        ({"checkpoint-9": "both"}, "checkpoint-9", 2),
        # accelerate's example counts batches in it
        ({"step_800/pytorch_model_fsdp_0": "model", "step_800/optimizer_0": "optim"}, "step_800", 2),
        ({"step_9/exp/lr1/x": "model"}, "step_9/exp/lr1/x", None),
        ({"step_9/policy/weights": "model"}, "step_9/policy/weights", None),
        ({"step_5/policy": "torch_dist"}, "step_5/policy", 0),
    ],
)
def test_a_folder_that_is_no_trees_gives_no_step(
    tmp_path: Path, parts: Path, tree: Mapping[str, str], given: str, step: int | None
) -> None:
    lay(parts, tmp_path, tree)
    reader = open_checkpoint(tmp_path / given, None, Hints(companions=read_companions(parts / "hf")))
    assert reader.iteration == step


def test_what_was_opened_and_what_its_iteration_counts_are_said(tmp_path: Path, parts: Path) -> None:
    lay(parts, tmp_path / "run", POLICY)
    policy = tmp_path / "run" / "step_7" / "policy"
    told = conversions.run(tmp_path / "run", tmp_path / "out", "hf", reference=parts / "hf", drop_optimizer=True).notes
    assert f"Read: {policy}" in told
    hints = Hints(companions=read_companions(parts / "hf"))
    (tmp_path / "newest").symlink_to(policy.parent)
    reader = open_checkpoint(tmp_path / "newest" / "policy", None, hints)
    assert reader.iteration == 7 and any("Adam made 2" in note for note in reading_notes(reader))
    alone = open_checkpoint(policy / "weights", None, hints)
    assert any(f"{policy / 'optimizer'} stays behind: give {policy}" in note for note in reading_notes(alone))
