"""A run of another trainer goes on in ours as it would have gone on where it was."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import conversions
import numpy as np
import pytest
import torch
import trained_models
import training
from soaking import in_soak
from trainer_directories import automodel, deepspeed, hf_trainer, pytorch, verl

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import CheckpointError, MissingTensor
from precisionctl.recipe import load_recipe
from precisionctl.reports.run import beginning
from precisionctl.trainer import run_plan
from precisionctl.trainer.data.rows import EqualRows, Rows
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.model.loss import loss
from precisionctl.trainer.optimizer.adamw import MasterAdamW
from precisionctl.trainer.run import Run
from precisionctl.trainer.saved import loading

ROWS = Rows(np.zeros(2, np.int32), None, EqualRows(1, 1), padding=0, largest=0, digest="")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("family", "saved"),
    [
        ("qwen3-moe", hf_trainer),
        ("gemma4-moe", deepspeed),
        *in_soak(("llama-3", pytorch), ("qwen2", verl), ("qwen3-moe", automodel)),
        *in_soak(("llama-3", deepspeed), ("gemma4", hf_trainer)),
        *in_soak(("gemma4", pytorch), ("gemma4", deepspeed), ("gemma4-moe", pytorch)),
    ],
)
def test_the_next_five_losses_are_the_other_trainers_but_for_rounding(
    tmp_path: Path, family: str, saved: Callable[[Path, Any, Any], Path]
) -> None:
    """In FP32 both: what differs is the order of sums. Without the optimizer's state they are others."""
    model, optimizer = trained_models.trained(family)
    source = saved(tmp_path / "run", model, optimizer)
    conversions.run(source, tmp_path / "megatron", "megatron")
    expected = trained_models.train(model, optimizer, range(2, 7))
    for going_on in (source, tmp_path / "megatron"):
        assert losses(going_on) == pytest.approx(expected, rel=2e-5)
    conversions.run(source, tmp_path / "weights", "megatron", drop_optimizer=True)
    assert losses(tmp_path / "weights") != pytest.approx(expected, rel=1e-3)


def losses(path: Path) -> list[float]:
    """Those of steps 3 to 7 in our trainer."""
    source: Any = open_checkpoint(path)
    recipe, rate = load_recipe("bf16"), trained_models.RATE
    settings = replace(recipe.optimizer, lr=rate, beta2=0.95, weight_decay=0.1, clip_norm=0.0)
    ours = GPT(source.model, recipe.precision, dtype=torch.float32)
    run = Run(recipe, ours, MasterAdamW(ours, settings), ROWS)
    loading.load_weights(source, run)
    if loading.has_optimizer(source):
        loading.load_optimizer(source, run, loading.plan_optimizer(source, run))
    found = []
    for step in range(2, 7):
        count, generator = source.model.vocab_size, torch.Generator().manual_seed(step)
        ids = torch.randint(0, count, (2, 16), generator=generator)
        targets = ids[:, 1:]
        total = loss(ours(ids)[:, :-1], targets, torch.ones_like(targets, dtype=torch.bool), count)
        value = total / targets.numel()
        value.backward()
        run.optimizer.collect()
        run.optimizer.step(rate)
        found.append(float(value.detach()))
    return found


def of_hf_trainer(path: Path) -> Path:
    """A `checkpoint-7` with the optimizer of a model that a run of ours can go on with, and its tokenizer."""
    model, optimizer = trained_models.trained("llama-3", vocab_size=80)
    hf_trainer(training.add_tokenizer(path), model, optimizer)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 7}))
    return path


def test_resume_goes_on_from_a_trainers_directory_and_says_with_what(tmp_path: Path) -> None:
    """One without config and tokenizer, which the reference has."""
    model, optimizer = trained_models.trained("llama-3", vocab_size=80)
    source = deepspeed(tmp_path / "run", model, optimizer)
    reference = training.add_tokenizer(tmp_path / "reference")
    (source / "config.json").rename(reference / "config.json")
    made = training.settings(source, training.make_text(tmp_path / "text.txt"), tmp_path / "out", train__steps=3)
    with pytest.raises(CheckpointError, match="does not say which model it is.*`resume`.* a Hugging Face directory"):
        run_plan.dry_run(made)
    started, finished, _ = training.run(replace(made, reference=reference))
    assert (started.plan.load, started.step, finished.step) == ("full", 2, 3)
    said = "\n".join(beginning(started))
    assert "optimizer: masters and moments of the checkpoint, after 2 updates; it had beta2 0.999, here 0.95" in said
    assert "here 0.95 (--set optimizer.beta2=0.999 keeps it)" in said
    assert ": 1.00e-03 in step 3\n" in said  # a tenth of the peak, where the cosine ends
    assert "schedule: as --set says, the recipe's goes on after step 2; --skip schedule begins it at step 0\n" in said
    assert "the checkpoint's last learning rate was 1.00e-03, and 2.00e-03 before any schedule\n" in said
    assert "not carried over from the run: the schedule of learning rates, whose kind is not stored, " in said
    saved: Any = open_checkpoint(finished.checkpoint)
    assert saved.common["optimizer"]["optimizer"]["state"]["common_step"] == 3


def test_a_run_that_goes_on_in_its_folder_says_nothing_of_what_only_its_beginning_can_skip(tmp_path: Path) -> None:
    made = training.settings(
        of_hf_trainer(tmp_path / "checkpoint-7"),
        training.make_text(tmp_path / "text.txt"),
        tmp_path / "out",
        train__steps=10,
        train__save_every=1,
    )
    shutil.rmtree(training.run(made)[1].checkpoint)
    started, _, _ = training.run(made)
    assert (started.continues, started.step) == (True, 9)
    said = "\n".join(beginning(started))
    assert "learning rates: the recipe's cosine" in said and "--skip" not in said and "not carried over" not in said


def test_an_optimizer_that_a_run_cannot_go_on_from_is_refused_until_it_is_left_behind(tmp_path: Path) -> None:
    source, text = of_hf_trainer(tmp_path / "checkpoint-7"), training.make_text(tmp_path / "text.txt")
    saved = torch.load(source / "optimizer.pt", weights_only=True)
    saved["state"][0]["step"] += 1
    torch.save(saved, source / "optimizer.pt")
    made = training.settings(source, text, tmp_path / "run", train__steps=8)
    for start in (run_plan.dry_run, training.run):
        with pytest.raises(CheckpointError, match=r"different numbers of updates.*Use --skip optimizer"):
            start(made)
    assert training.run(replace(made, skip=("optimizer",), out=tmp_path / "skipped"))[0].step == 7
    del saved["state"][0]
    torch.save(saved, source / "optimizer.pt")
    with pytest.raises(MissingTensor, match=r"no state of 1 parameter, such as.*Use --skip optimizer"):
        training.run(made)
    started, _, _ = training.run(
        replace(made, out=tmp_path / "w", load="weights", overrides=(*made.overrides, "train.steps=1"))
    )
    assert started.step == 0 and started.notes[-1] == "the checkpoint's optimizer state is left behind"
