"""A run of another trainer goes on in ours as it would have gone on where it was."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import conversions
import deepspeed_files
import numpy as np
import pytest
import torch
import trained_models
import verl_files

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.recipe import load_recipe
from precisionctl.trainer.data.rows import EqualRows, Rows
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.model.loss import loss
from precisionctl.trainer.optimizer.adamw import MasterAdamW
from precisionctl.trainer.run import Run
from precisionctl.trainer.saved import loading

ROWS = Rows(np.zeros(2, np.int32), None, EqualRows(1, 1), padding=0, largest=0, digest="")
KINDS = trained_models.MOMENTS


def hf_trainer(path: Path, model: Any, optimizer: Any) -> Path:
    model.save_pretrained(path)
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    return path


def pytorch(path: Path, model: Any, optimizer: Any) -> Path:
    return trained_models.config_of(model, trained_models.save(path, trained_models.states(model, optimizer)))


def deepspeed(path: Path, model: Any, optimizer: Any) -> Path:
    states = {kind: trained_models.moments(model, optimizer, kind) for kind in KINDS}
    states["fp32"] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    deepspeed_files.save(path, states, 3, 2, step=2)
    return trained_models.config_of(model, path)


def verl(path: Path, model: Any, optimizer: Any) -> Path:
    states = {kind: trained_models.moments(model, optimizer, kind) for kind in KINDS}
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    verl_files.save(path, weights, states, 2, step=2)
    trained_models.config_of(model, path / "huggingface")
    return path


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("family", "saved"), [("qwen3-moe", hf_trainer), ("llama-3", pytorch), ("llama-3", deepspeed), ("qwen2", verl)]
)
def test_the_next_five_losses_are_the_other_trainers_but_for_rounding(
    tmp_path: Path, family: str, saved: Callable[[Path, Any, Any], Path]
) -> None:
    """In FP32 both: what differs is the order of sums. Without the optimizer's state they are others."""
    model, optimizer = trained_models.trained(family)
    source = saved(tmp_path / "run", model, optimizer)
    (note,) = loading.loading_notes(load_recipe("bf16"), None, open_checkpoint(source), frozenset(), ())
    assert "--to megatron" in note  # resume itself would begin with an optimizer of its own
    conversions.run(source, tmp_path / "megatron", "megatron")
    expected = trained_models.train(model, optimizer, range(2, 7))
    assert losses(tmp_path / "megatron") == pytest.approx(expected, rel=2e-5)
    conversions.run(source, tmp_path / "weights", "megatron", drop_optimizer=True)
    assert losses(tmp_path / "weights") != pytest.approx(expected, rel=1e-3)


def losses(megatron: Path) -> list[float]:
    """Those of steps 3 to 7 in our trainer."""
    source: Any = open_checkpoint(megatron)
    recipe, rate = load_recipe("bf16"), trained_models.RATE
    settings = replace(recipe.optimizer, lr=rate, beta2=0.95, weight_decay=0.1, clip_norm=0.0)
    ours = GPT(source.model, recipe.precision, dtype=torch.float32)
    run = Run(recipe, ours, MasterAdamW(ours, settings), ROWS)
    loading.load_weights(source, run)
    if loading.has_optimizer(source):
        loading.load_optimizer(source, run)
    found = []
    for step in range(2, 7):
        count, generator = source.model.vocab_size, torch.Generator().manual_seed(step)
        ids = torch.randint(0, count, (2, 16), generator=generator)
        targets = ids[:, 1:]
        total, number = loss(ours(ids)[:, :-1], targets, torch.ones_like(targets, dtype=torch.bool), count)
        value = total / number
        value.backward()
        run.optimizer.collect()
        run.optimizer.step(rate)
        found.append(float(value.detach()))
    return found
