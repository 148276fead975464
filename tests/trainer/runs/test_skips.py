"""Steps whose loss or gradients are no numbers: skipped, counted, bounded, and without a trace in weights or scales."""

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from soaking import in_soak
from training import contents, losses, run, run_with_kills, scales, settings

from precisionctl.checkpoints.base import WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.errors import DamagedCheckpoint, PrecisionError
from precisionctl.fp8 import sidecar
from precisionctl.recipe import load_recipe
from precisionctl.reports.compare_runs import LAST_STEPS, compare
from precisionctl.reports.run import warnings
from precisionctl.trainer import loop, resume as trainer
from precisionctl.trainer.data.rows import EqualRows, Rows
from precisionctl.trainer.measure.metrics import FILE, read_metrics
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.optimizer.adamw import MasterAdamW
from precisionctl.trainer.passes import accumulate_gradients
from precisionctl.trainer.run import Run


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    source: Any = TorchDistReader(checkpoint)
    both = WithOptimizer(source)
    return {name: read_tensor(both, name) for name in both.specs}


def same(a: Path, b: Path, without: Collection[str] = ()) -> bool:
    left, right = tensors(a), tensors(b)
    return all(torch.equal(left[name], right[name]) for name in left.keys() | right.keys())


@pytest.mark.parametrize("precision", ["fp8", *in_soak("bf16", "bf16 --collect-amax")])
def test_a_skipped_step_leaves_the_weights_the_optimizer_and_the_scales_as_they_are(
    place: Path, tmp_path: Path, broken: set[int], precision: str
) -> None:
    precision, _, collect = precision.partition(" ")
    broken |= {3}
    made = settings(
        place / "source",
        place / "text.txt",
        tmp_path / "run",
        precision,
        train__save_every=1,
        train__keep=9,
        collect_amax=bool(collect),
    )
    said: list[str] = []
    trainer.resume(made, lambda started: None, lambda step: said.extend(warnings(step)))
    assert same(tmp_path / "run/iter_0000002", tmp_path / "run/iter_0000003")
    assert not same(tmp_path / "run/iter_0000003", tmp_path / "run/iter_0000004")
    rows = [*read_metrics(tmp_path / "run" / FILE)]
    assert [row.get("skipped") for row in rows] == [None, None, 1, None, None, None]
    assert [math.isfinite(row["loss"]) for row in rows] == [True, True, False, True, True, True]
    assert said == ["Step 3 is skipped: its loss is nan, its gradients' norm nan"]
    saved = TorchDistReader(tmp_path / "run/iter_0000006")
    assert saved.common["optimizer"]["optimizer"]["state"]["common_step"] == 5
    if precision == "fp8" or collect:
        for step in (3, 6):
            reader = TorchDistReader(tmp_path / f"run/iter_000000{step}")
            found = sidecar.find(reader.path) if collect else reader.fp8
            numbers = [number for scale, history in scales(found).values() for number in (scale, *history)]
            assert all(map(math.isfinite, numbers)) and any(numbers)
    (gap,) = compare([tmp_path / "run", tmp_path / "run"], LAST_STEPS).gaps
    assert (gap.steps, gap.mean) == (5, 0.0)


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["fp8", *in_soak("bf16")])
def test_a_run_that_skipped_and_is_killed_ends_as_one_that_is_not(
    place: Path, tmp_path: Path, broken: set[int], precision: Any
) -> None:
    broken |= {2, 4, 5}
    whole = settings(place / "source", place / "text.txt", tmp_path / "whole", precision)
    run(whole)
    killed = settings(place / "source", place / "text.txt", tmp_path / "killed", precision)
    run_with_kills(killed, {1, 3, 5, 6})
    assert str(losses(tmp_path / "killed")) == str(losses(tmp_path / "whole"))  # NaN is not itself
    assert contents(tmp_path / "killed/iter_0000006") == contents(tmp_path / "whole/iter_0000006")


def test_too_many_running_end_the_run_and_are_counted_through_a_kill(
    place: Path, tmp_path: Path, broken: set[int]
) -> None:
    broken |= {1, 3, 4, 5}
    changes = {"train__max_skipped": 2, "train__save_every": 1}
    made = settings(place / "source", place / "text.txt", tmp_path / "run", **changes)
    with pytest.raises(PrecisionError, match=r"step 5 has loss nan .* the last of 3 skipped steps in a row"):
        run_with_kills(made, {2, 4})
    assert sorted(path.name for path in (tmp_path / "run").glob("iter_*")) == ["iter_0000003", "iter_0000004"]
    more = settings(place / "source", place / "text.txt", tmp_path / "run", **changes | {"train__max_skipped": 3})
    started, finished, _ = run(more)
    assert (started.step, finished.step) == (4, 6)


def test_with_none_allowed_the_first_one_ends_the_run_with_nothing_saved(place: Path, tmp_path: Path) -> None:
    hopeless = {"optimizer__lr": 1e30, "train__save_every": 9, "train__max_skipped": 0}
    with pytest.raises(PrecisionError, match=r"step 2 has loss [\d.]+ and gradient norm nan\. These steps"):
        run(settings(place / "source", place / "text.txt", tmp_path / "run", **hopeless))
    assert not list((tmp_path / "run").glob("iter_*"))


def test_weights_with_which_no_step_works_are_looked_at_before_the_rate(
    place: Path, tmp_path: Path, broken: set[int]
) -> None:
    broken |= {1, 2}
    hopeless = {"train__max_skipped": 1, "train__save_every": 9}
    with pytest.raises(PrecisionError, match="the last of 2 skipped steps in a row") as refused:
        run(settings(place / "source", place / "text.txt", tmp_path / "run", **hopeless))
    assert "Are the weights finite?" in refused.value.do and "optimizer.lr" not in refused.value.do


@pytest.mark.soak
def test_weights_of_a_run_that_goes_on_from_a_later_step_are_looked_at_before_the_rate(
    place: Path, tmp_path: Path, broken: set[int]
) -> None:
    run(settings(place / "source", place / "text.txt", tmp_path / "first", train__steps=2))
    broken |= {3, 4, 5, 6}
    hopeless = {"load": "full", "train__max_skipped": 2, "train__save_every": 1}
    made = settings(tmp_path / "first", place / "text.txt", tmp_path / "run", **hopeless)
    with pytest.raises(PrecisionError, match="step 5 has loss nan .* the last of 3") as refused:
        run_with_kills(made, {3})
    assert "Are the weights finite?" in refused.value.do


def test_a_step_is_made_where_only_a_loss_of_routers_is_not_finite(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A z-loss has squares, which overflow before its gradient does. What counts skipped steps reads no such loss."""
    source, recipe = open_checkpoint(place / "source"), load_recipe("bf16")
    model = GPT(source.model, recipe.precision)
    rows = Rows(np.zeros(9, np.int32), None, EqualRows(1, 8), padding=0, largest=0, digest="")
    held = Run(recipe, model, MasterAdamW(model, recipe.optimizer), rows)
    before = {name: weight.clone() for name, weight in held.optimizer.tensors["param"].items()}

    def with_router(*given: Any) -> torch.Tensor:
        return torch.cat([accumulate_gradients(*given), torch.tensor([math.inf])])

    monkeypatch.setattr(loop, "accumulate_gradients", with_router)
    numbers, _ = loop.update(held)
    assert [math.isfinite(number) for number in numbers.tolist()] == [True, True, False]
    assert any(not torch.equal(weight, before[name]) for name, weight in held.optimizer.tensors["param"].items())


def test_a_damaged_count_is_one_clear_error(place: Path, tmp_path: Path) -> None:
    made = settings(place / "source", place / "text.txt", tmp_path / "run", train__steps=1)
    _, finished, _ = run(made)
    note = finished.checkpoint / "precisionctl/run.json"
    written = json.loads(note.read_text())
    for skips in ([], {"total": "1", "running": 0}, {"total": 1, "x": 0}):
        note.write_text(json.dumps(written | {"skips": skips}))
        with pytest.raises(DamagedCheckpoint, match="its skipped steps"):
            run(made)
    note.write_text(json.dumps(written | {"skips": {"total": 1}}))  # what is not said is 0
    run(made)
