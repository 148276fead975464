"""Runs under the recipes that keep no state: saved, gone on with, switched to and from; and layers kept in BF16."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from soaking import few, in_soak
from training import losses, run, scales, settings

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.codes.statistics import NAMES
from precisionctl.errors import RecipeError
from precisionctl.evaluate import evaluate
from precisionctl.fp8 import sidecar
from precisionctl.precision import Precision
from precisionctl.readiness.assess import assess
from precisionctl.reports import inspect as report, run as run_report
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.measure.metrics import FILE, read_metrics
from precisionctl.trainer.model.gpt import GPT

STATELESS = ["current", "block", "mxfp8", "nvfp4"]


def precision_of(scaling: str) -> str:
    """What the command line has to say of it."""
    return "nvfp4" if scaling == "nvfp4" else "fp8"


@pytest.fixture(scope="module")
def delayed(place: Path) -> Path:
    _, finished, _ = run(settings(place / "source", place / "text.txt", place / "delayed", "fp8", train__steps=2))
    return finished.checkpoint


@pytest.mark.parametrize("scaling", few(STATELESS, "mxfp8", "nvfp4"))
def test_a_run_in_two_parts_is_the_run_in_one_and_saves_no_state(place: Path, tmp_path: Path, scaling: str) -> None:
    whole = settings(
        place / "source",
        place / "text.txt",
        tmp_path / "whole",
        precision_of(scaling),
        precision__scaling=scaling,
        train__steps=4,
        schedule__kind="constant",
    )
    started, finished, _ = run(whole)
    assert started.fp8 == {}
    assert run_report.precision(started.plan) == ("NVFP4" if scaling == "nvfp4" else f"FP8, {NAMES[scaling]} scaling")
    parts = replace(whole, out=tmp_path / "parts")
    run(replace(parts, overrides=(*parts.overrides, "train.steps=2")))
    run(parts)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    reader = open_checkpoint(finished.checkpoint)
    assert reader.fp8 is None
    assert report.describe(reader)["precision"] == "bfloat16"
    ready = assess(reader, None, lambda total: nullcontext(lambda count: None))
    assert any("no FP8 state" in note for note in ready.notes)


@pytest.mark.parametrize("scaling", ["block", *in_soak("mxfp8")])
def test_the_state_of_delayed_scaling_is_carried_beside_such_a_run_and_is_of_other_weights_after_it(
    place: Path, delayed: Path, tmp_path: Path, scaling: str
) -> None:
    between = settings(
        delayed,
        place / "text.txt",
        tmp_path / scaling,
        "fp8",
        load="weights",
        precision__scaling=scaling,
        train__steps=1,
    )
    _, finished, _ = run(between)
    before = scales(open_checkpoint(delayed).fp8)
    assert scales(sidecar.find(finished.checkpoint)) == before
    changes = {"load": "weights", "train__steps": 1, "precision__scaling": "delayed"}
    back = settings(finished.checkpoint, place / "text.txt", tmp_path / "back", "fp8", **changes)
    started, _, _ = run(back)
    assert "carried" not in started.fp8 and started.fp8["warm-up"]["input"] == 8


@pytest.mark.parametrize("scaling", few(STATELESS, "block"))
def test_a_run_is_evaluated_under_its_own_recipe(place: Path, tmp_path: Path, scaling: str) -> None:
    """The loss that training measured on held-out text is the one that `eval` finds in the checkpoint; that of the
    values, in BF16, is another."""
    held_out = place / "held_out.txt"
    changes = {"precision__scaling": scaling, "precision__keep_bf16": '["*.linear_proj"]', "data__held_out": held_out}
    changes["train__micro_batch_size"] = 4  # as `eval` takes rows: a scale of current scaling is of all of them
    run(settings(place / "source", place / "text.txt", tmp_path / "run", "fp8", train__steps=2, **changes))
    measured = [*read_metrics(tmp_path / "run" / FILE)][-1]["held_out_loss"]
    reader = open_checkpoint(tmp_path / "run")
    found = evaluate(reader, held_out, sequence_length=32, against=reader)
    assert found.loss == pytest.approx(measured, rel=1e-6)
    assert found.precision == f"FP8 with {NAMES[scaling]} scaling, bfloat16 weights"
    assert found.against and found.against.precision == "bfloat16"
    assert abs(found.against.loss - found.loss) > 1e-5 * found.loss


@pytest.mark.soak
def test_block_scaling_learns_what_bf16_learns(place: Path, tmp_path: Path) -> None:
    curves = {}
    for name, changes in {
        "bf16": {"precision": "bf16"},
        "block": {"precision": "fp8", "precision__scaling": "block"},
        "mxfp8": {"precision": "fp8", "precision__scaling": "mxfp8"},
    }.items():
        made = settings(
            place / "source", place / "text.txt", tmp_path / name, train__steps=20, train__save_every=20, **changes
        )
        _, _, seen = run(made)
        curves[name] = seen
    assert curves["bf16"][-1] < 0.7 * curves["bf16"][0]
    for name in ("block", "mxfp8"):
        assert curves[name] != curves["bf16"]
        assert curves[name][0] == pytest.approx(curves["bf16"][0], rel=0.001)
        assert sum(curves[name]) == pytest.approx(sum(curves["bf16"]), rel=0.01)


KEPT = Precision(fp8=True, num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=1)


def test_the_first_and_last_layers_stay_in_bf16() -> None:
    """As megatron/core/fp8_utils.py, is_first_last_bf16_layer, of 12 layers."""
    precision = KEPT.of_layers(12)
    in_fp8 = [precision.in_fp8(f"decoder.layers.{layer}.mlp.linear_fc1") for layer in range(12)]
    assert in_fp8 == [2 <= layer < 11 for layer in range(12)]
    assert precision.in_fp8("mtp.layers.0.transformer_layer.mlp.linear_fc1")
    with pytest.raises(AssertionError, match="call of_layers first"):
        KEPT.in_fp8("decoder.layers.3.mlp.linear_fc1")
    with pytest.raises(RecipeError, match="the first 2 and the last 1 layers in BF16 leave none of 3"):
        KEPT.of_layers(3)
    with pytest.raises(RecipeError, match="num_layers_at_end_in_bf16 = -1 must be 0 or above"):
        Precision(fp8=True, num_layers_at_end_in_bf16=-1)


@pytest.mark.parametrize("end", [1, *in_soak(0)])
def test_a_run_keeps_its_first_or_last_layer_in_bf16(place: Path, tmp_path: Path, end: int) -> None:
    made = settings(
        place / "source",
        place / "text.txt",
        tmp_path / "run",
        "fp8",
        train__steps=2,
        **{("precision__num_layers_at_end_in_bf16" if end else "precision__num_layers_at_start_in_bf16"): 1},
    )
    _, finished, _ = run(made)
    reader = open_checkpoint(finished.checkpoint)
    assert reader.fp8 is not None
    assert {name.split(".")[2] for name in reader.fp8.modules} == {str(1 - end)}
    (again, *_) = run(replace(made, overrides=(*made.overrides, "train.keep=3")))
    assert again.step == 2
    model = GPT(reader.model, replace(KEPT, num_layers_at_start_in_bf16=0).of_layers(reader.model.num_layers))
    assert {name.split(".")[2] for name in fp8_linears(model)} == {"0"}
