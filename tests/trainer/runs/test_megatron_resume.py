"""Runs that go on from Megatron-LM's: masters, moments and the schedule are those that megatron-core itself had; and
what of a checkpoint may be left behind."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import repository
import torch
from core_models import SAVED_ARGS
from installed import judge
from mcore_legacy import local
from mcore_optimizer import BATCH, SCHEDULES, WAYS
from programs import MEGATRON, run_program
from soaking import few
from training import make_place, make_source, run, settings

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.torch_files import dcp_metadata
from precisionctl.errors import CheckpointError, DamagedCheckpoint, MissingTensor, RecipeError, UnmappedTensor
from precisionctl.recipe import load_recipe
from precisionctl.reports.run import beginning
from precisionctl.trainer.data.rows import EqualRows, Rows
from precisionctl.trainer.measure.metrics import FILE, read_metrics
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.optimizer.adamw import MasterAdamW
from precisionctl.trainer.optimizer.megatron_schedule import megatron_scheduler, read_schedule, training_args
from precisionctl.trainer.run import Run
from precisionctl.trainer.saved import loading

ROWS = Rows(np.zeros(2, np.int32), None, EqualRows(1, 1), padding=0, largest=0, digest="")
GOING_ON = {"load": "full", "train__steps": 8, "train__save_every": 3, "train__batch_size": BATCH}


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What megatron-core saved after an update, for each way to store its optimizer; and a text with its tokens."""
    judge("psutil", "a save of megatron-core waits for ever without it")
    folder = make_place(tmp_path_factory.mktemp("megatron"))
    (folder / "args.json").write_text(json.dumps(SAVED_ARGS))
    program = repository.HELPERS / "mcore_optimizer.py"
    run_program(program, folder, folder / "args.json", imports=MEGATRON)
    for way in WAYS:
        words = folder / way / "iter_0000005/precisionctl/hf"
        words.mkdir(parents=True)
        for file in (folder / "source").glob("tokenizer*"):
            (words / file.name).write_bytes(file.read_bytes())
    return folder


def made_run(source: Any) -> Run:
    recipe = load_recipe("bf16")
    model = GPT(source.model, recipe.precision)
    return Run(recipe, model, MasterAdamW(model, recipe.optimizer), ROWS)


@pytest.mark.parametrize("way", WAYS)
def test_masters_and_moments_that_megatron_core_saved_are_those_it_had(megatron: Path, way: str) -> None:
    source: Any = open_checkpoint(megatron / way)
    held = made_run(source)
    loading.load_optimizer(source, held, loading.plan_optimizer(source, held))
    assert held.optimizer.steps == 1
    expected = torch.load(megatron / "expected.pt", weights_only=True)
    assert {local(name) for name in held.optimizer.masters} == set(expected)
    for kind, tensors in held.optimizer.tensors.items():
        assert all(torch.equal(tensor, expected[local(name)][kind]) for name, tensor in tensors.items())
    assert all(torch.equal(value, read_tensor(source, name)) for name, value in held.model.named_parameters())


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rates_are_those_of_megatron_s_own_scheduler(megatron: Path, name: str) -> None:
    told = json.loads((megatron / "rates.json").read_text())[name]
    schedule = read_schedule({"opt_param_scheduler": told["state"]}, told["args"], 3, "")
    assert schedule is not None
    found = [schedule.rate(step, BATCH) for step in range(4, 34)]
    assert found == pytest.approx(told["rates"], rel=1e-12)
    assert len(set(found)) > (1 if "constant" in name else 10)


def test_a_wsd_schedule_that_counts_iterations_is_one_that_counts_samples(megatron: Path) -> None:
    told = json.loads((megatron / "rates.json").read_text())["WSD linear"]
    common = {"opt_param_scheduler": told["state"]}
    iterations = {"lr_wsd_decay_iters": 40 // BATCH, "global_batch_size": BATCH, "lr_wsd_decay_style": "linear"}
    assert read_schedule(common, iterations, 3, "") == read_schedule(common, told["args"], 3, "")
    assert read_schedule({}, {}, 3, "") is None


@pytest.mark.parametrize("batch", [BATCH, 16])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_of_ours_saves_all_of_a_schedule_that_it_goes_on_with(megatron: Path, name: str, batch: int) -> None:
    """WSD's decay over 40 samples is not a whole number of batches of 16."""
    told = json.loads((megatron / "rates.json").read_text())[name]
    schedule = read_schedule({"opt_param_scheduler": told["state"]}, told["args"], 3, "")
    recipe = load_recipe("bf16", [f"train.batch_size={batch}"])
    args = training_args(recipe, schedule, 0)
    assert read_schedule({"opt_param_scheduler": megatron_scheduler(recipe, schedule, 3)}, args, 3, "") == schedule


@pytest.mark.parametrize(
    "damage",
    [
        {"lr_decay_style": "??"},
        {"max_lr": "x"},
        {"num_steps": -1},
        {"num_steps": 1.5},
        {"lr_decay_steps": 5},
        {"min_lr": 1.0},
        {"max_lr": float("nan")},
        {"max_lr": True},
        {"max_lr": 10**400},
        {"max_lr": 1 << 63},
        {"lr_decay_style": "WSD"},
    ],
    ids=str,
)
def test_a_schedule_that_is_none_of_megatron_s_is_one_clear_error(megatron: Path, damage: dict[str, Any]) -> None:
    told = json.loads((megatron / "rates.json").read_text())["cosine"]
    with pytest.raises(DamagedCheckpoint, match=r"its schedule is none of Megatron's.*--skip schedule"):
        read_schedule({"opt_param_scheduler": told["state"] | damage}, {}, 3, "")
    with pytest.raises(DamagedCheckpoint, match="its schedule is none of Megatron's"):
        read_schedule({"opt_param_scheduler": []}, {}, 3, "")


def from_megatron(megatron: Path, out: Path, way: str = "plain", **changes: Any) -> Any:
    """A run of the checkpoint's own schedule: with no key of it on the command line."""
    made = settings(megatron / way, megatron / "text.txt", out, **GOING_ON | changes)
    kept = [key for key in made.overrides if not key.startswith(("optimizer.lr", "schedule."))]
    given = [f"{key.replace('__', '.')}={value}" for key, value in changes.items() if key.startswith("schedule__")]
    return SimpleNamespace(**vars(made)), type(made)(**vars(made) | {"overrides": (*kept, *given)})


def rates_of(out: Path) -> list[float]:
    return [row["lr"] for row in read_metrics(out / FILE)]


def expected_rates(megatron: Path, steps: range) -> list[float]:
    """Of a scheduler that has seen five batches of the first schedule before step 6; three are in the file."""
    told = json.loads((megatron / "rates.json").read_text())["cosine"]["rates"]
    return [told[step - 4] for step in steps]


@pytest.mark.parametrize("way", few(WAYS, "plain"))
def test_a_run_goes_on_with_megatron_s_optimizer_at_its_rate_and_says_so(
    megatron: Path, tmp_path: Path, way: str
) -> None:
    _, made = from_megatron(megatron, tmp_path / "run", way)
    started, finished, losses = run(made)
    assert (started.plan.load, started.step, finished.step, len(losses)) == ("full", 5, 8, 3)
    assert rates_of(tmp_path / "run") == pytest.approx(expected_rates(megatron, range(6, 9)), rel=1e-12)
    said = "\n".join(beginning(started))
    assert "from step 5 to 8, weights and optimizer" in said
    assert "optimizer: masters and moments of the checkpoint, after 1 update; it had beta2 0.999, here 0.95" in said
    assert "learning rates: the checkpoint's (cosine, 1.00e-03 to 1.00e-04 over 100 samples, after 20): " in said
    assert all(f"{rates_of(tmp_path / 'run')[step - 6]:.2e} in step {step}" in said for step in (6, 8))
    saved = TorchDistReader(finished.checkpoint)
    assert saved.common["opt_param_scheduler"]["num_steps"] == 20 + 3 * BATCH
    assert saved.common["opt_param_scheduler"]["max_lr"] == 1e-3
    started, _, losses = run(made)
    assert (started.step, losses) == (8, [])


def test_a_branch_with_another_batch_size_counts_the_samples_that_were_seen(megatron: Path, tmp_path: Path) -> None:
    """Before step 9 a scheduler has seen the same samples whatever the branch's batches, and after it two as large."""
    _, finished, _ = run(from_megatron(megatron, tmp_path / "run")[1])
    schedule = loading.schedule_of(TorchDistReader(finished.checkpoint), (), ())
    assert schedule is not None
    found = [schedule.rate(step, 2 * BATCH) for step in (9, 10)]
    assert found == pytest.approx([*expected_rates(megatron, range(9, 12, 2))], rel=1e-12)


@pytest.mark.soak
def test_a_branch_of_a_run_that_goes_on_with_megatron_s_schedule_does_so_too(megatron: Path, tmp_path: Path) -> None:
    _, made = from_megatron(megatron, tmp_path / "run")
    _, _, whole = run(made)
    _, branch = from_megatron(megatron, tmp_path / "branch")
    started, _, losses = run(type(made)(**vars(branch) | {"checkpoint": tmp_path / "run/iter_0000006"}))
    assert (started.step, losses) == (6, whole[1:])
    assert rates_of(tmp_path / "branch") == rates_of(tmp_path / "run")[1:]


def test_the_command_line_s_rates_come_before_the_checkpoint_s(megatron: Path, tmp_path: Path) -> None:
    _, made = from_megatron(megatron, tmp_path / "run", schedule__kind="constant")
    started, _, _ = run(made)
    assert started.step == 5 and any("schedule: as --set says, " in note for note in started.notes)
    assert rates_of(tmp_path / "run") == [5e-5 * 0 + load_recipe("bf16").optimizer.lr * step / 20 for step in (6, 7, 8)]


def test_generators_of_a_run_without_a_gpu_are_restored_on_a_machine_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"torch_rng_state": torch.get_rng_state(), "cuda_rng_state": None}
    source: Any = SimpleNamespace(objects=(loading.RNG,), read_object=lambda name: state, path=tmp_path)
    torch.rand(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    loading.load_rng(source)
    assert torch.equal(torch.get_rng_state(), state["torch_rng_state"])


def test_each_part_of_a_checkpoint_can_be_left_behind(megatron: Path, tmp_path: Path) -> None:
    """Of a run of ours, which has all of them: the FP8 state, too."""
    first = settings(megatron / "source", megatron / "text.txt", tmp_path / "first", "fp8", train__steps=4)
    run(first)
    found: dict[str, Any] = {}
    for skip in ("", "optimizer", "schedule", "data", "rng", "fp8", "schedule data"):
        chosen = tuple(skip.split())
        out = tmp_path / (skip or "all")
        on = settings(tmp_path / "first", megatron / "text.txt", out, "fp8", train__steps=6, train__seed=1, skip=chosen)
        started, finished, losses = run(on)
        saved = TorchDistReader(finished.checkpoint)
        note = json.loads((finished.checkpoint / "precisionctl/run.json").read_text())
        found[skip] = {
            "step": started.step,
            "updates": saved.common["optimizer"]["optimizer"]["state"]["common_step"],
            "position": note["position"],
            "fp8": set(started.fp8),
            "first loss": losses[0],
            "rng": saved.read_object(loading.RNG)["torch_rng_state"].tolist(),
        }
    everything = {"step": 4, "updates": 6, "position": 24, "fp8": {"carried"}}
    assert found[""].items() >= everything.items()
    expected = {
        "optimizer": {"updates": 2},
        "schedule": {"step": 0, "updates": 4 + 6, "position": 16 + 24},
        "data": {"position": 8},
        "fp8": {"fp8": {"warm-up"}},
        "rng": {},
        "schedule data": {"step": 0, "updates": 10, "position": 24},
    }
    for skip, changes in expected.items():
        assert found[skip].items() >= (everything | changes).items(), skip
    assert found["rng"].pop("rng") != found[""]["rng"] and found["optimizer"]["rng"] == found[""]["rng"]
    assert found["rng"].items() <= found[""].items()
    assert found["data"]["first loss"] != found[""]["first loss"] == found["optimizer"]["first loss"]
    assert found["fp8"]["first loss"] != found[""]["first loss"]


@pytest.mark.soak
def test_weights_alone_are_a_new_run_with_nothing_else_of_the_old_one(megatron: Path, tmp_path: Path) -> None:
    for way in ("plain", "dp_reshardable"):
        _, made = from_megatron(megatron, tmp_path / way, way, load="weights")
        started, _, _ = run(made)
        assert (started.plan.load, started.step) == ("weights", 0)
        assert "the checkpoint's optimizer state is left behind" in started.notes
    full = settings(megatron / "source", megatron / "text.txt", tmp_path / "out", load="full")
    with pytest.raises(CheckpointError, match=r"no optimizer state that can be read .*--skip optimizer"):
        run(full)
    started, _, losses = run(type(full)(**vars(full) | {"skip": ("optimizer",)}))
    assert (started.step, len(losses)) == (0, 6)  # a checkpoint of no run begins at its beginning


def test_the_steps_of_the_checkpoint_count(megatron: Path, tmp_path: Path) -> None:
    _, made = from_megatron(megatron, tmp_path / "run", train__steps=5)
    with pytest.raises(RecipeError, match=r"the checkpoint is at step 5, and train.steps is 5.*--skip schedule"):
        run(made)


def test_an_optimizer_of_other_parameters_is_a_table_both_ways(megatron: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (megatron / "plain/iter_0000005").rename(source)
    try:
        index = dcp_metadata.read_index(source)
        renamed = {key.replace("exp_avg.decoder.layers.mlp", "exp_avg.mlp"): t for key, t in index.tensors.items()}
        dcp_metadata.write_index(source, dcp_metadata.Index(renamed, index.objects))
        made = settings(source, megatron / "text.txt", tmp_path / "run", **GOING_ON)
        with pytest.raises(MissingTensor) as caught:
            run(made)
        lines = caught.value.what.splitlines()
        assert lines[0] == "the checkpoint's tensors are not the model's: 12 missing, 3 unexpected"
        assert "  missing     optimizer.state.exp_avg.decoder.layers.*.mlp.linear_fc2.weight  (4)" in lines
        assert "  unexpected  optimizer.state.exp_avg.mlp.linear_fc2.weight" in lines
        assert "--skip optimizer" in caught.value.do
        assert not list((tmp_path / "run").glob("iter_*"))
        dcp_metadata.write_index(source, index)
    finally:
        source.rename(megatron / "plain/iter_0000005")


@pytest.mark.soak
def test_what_no_optimizer_trains_needs_no_state_in_one(megatron: Path, tmp_path: Path) -> None:
    """Megatron's optimizer has nothing of the router's bias, which a rule changes, and nor has ours."""
    sizes = {"q_lora_rank": 32, "qk_rope_head_dim": 16}
    source = make_source(tmp_path / "hf", family="deepseek-v3", **sizes)
    _, finished, _ = run(settings(source, megatron / "text.txt", tmp_path / "first", train__steps=1))
    keys = dcp_metadata.read_index(finished.checkpoint).tensors
    assert not any("optimizer" in key and "expert_bias" in key for key in keys)
    again = settings(finished.checkpoint, megatron / "text.txt", tmp_path / "second", train__steps=2, load="full")
    _, second, _ = run(again)
    before, after = (TorchDistReader(each.checkpoint) for each in (finished, second))
    biases = [name for name in before.specs if name.endswith("expert_bias")]
    assert len(biases) == 2
    assert all(torch.equal(read_tensor(before, name), read_tensor(after, name)) for name in biases)
    assert after.common["optimizer"]["optimizer"]["state"]["common_step"] == 2


def test_a_table_of_names_is_bounded_whatever_a_stranger_s_checkpoint_holds(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = make_source(tmp_path / "source")
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    many = {f"{letter * 3000}.{n}": torch.zeros(1) for letter in "abcdefghijklmnop" for n in range(20)}
    del tensors["model.norm.weight"]
    save_file(tensors | many, file, {"format": "pt"})
    with pytest.raises(MissingTensor) as caught:
        run(settings(source, tmp_path, tmp_path / "run", load="weights"))
    what = caught.value.what
    assert what.splitlines()[:2] == [
        "the checkpoint's tensors are not the model's: 1 missing, 320 unexpected",
        "  missing     model.norm.weight",
    ]
    assert what.splitlines()[-1] == "  unexpected  ... and 160 more" and len(what) < 1500
    save_file({**tensors, "model.norm.weight": torch.ones(32), **many}, file, {"format": "pt"})
    with pytest.raises(UnmappedTensor):
        run(settings(source, tmp_path, tmp_path / "run", load="weights"))
