"""Runs under the recipes that keep no state: saved, gone on with, switched to and from; and layers kept in BF16."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from soaking import few, in_soak
from training import contents, losses, run, run_with_kills, scales, settings

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.codes.statistics import NAMES
from precisionctl.errors import RecipeError
from precisionctl.evaluate import evaluate
from precisionctl.fp8 import sidecar
from precisionctl.precision import PRESETS, Precision
from precisionctl.readiness.assess import assess
from precisionctl.reports import inspect as report, run as run_report
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.measure.metrics import FILE, read_metrics
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.run_plan import dry_run

STATELESS = ["current", "block", "mxfp8", "nvfp4"]


def precision_of(scaling: str) -> str:
    """What the command line has to say of it."""
    return "nvfp4" if scaling == "nvfp4" else "fp8"


@pytest.fixture(scope="module")
def delayed(place: Path) -> Path:
    _, finished, _ = run(settings(place / "source", place / "text.txt", place / "delayed", "fp8", train__steps=2))
    return finished.checkpoint


@pytest.mark.parametrize("scaling", few(STATELESS, "mxfp8"))
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
    made = settings(
        place / "source", place / "text.txt", tmp_path / "run", precision_of(scaling), train__steps=2, **changes
    )
    run(made)
    measured = [*read_metrics(tmp_path / "run" / FILE)][-1]["held_out_loss"]
    reader = open_checkpoint(tmp_path / "run")
    found = evaluate(reader, held_out, sequence_length=32, against=reader)
    assert found.loss == pytest.approx(measured, rel=1e-6)
    kind = "NVFP4" if scaling == "nvfp4" else f"FP8 with {NAMES[scaling]} scaling"
    assert found.precision == f"{kind}, bfloat16 weights"
    assert found.against and found.against.precision == "bfloat16"
    assert abs(found.against.loss - found.loss) > 1e-5 * found.loss


@pytest.mark.parametrize(("scalings", "near"), [(["nvfp4"], 0.02), *in_soak((["block", "mxfp8"], 0.01))], ids=str)
def test_blocks_learn_what_bf16_learns(place: Path, tmp_path: Path, scalings: list[str], near: float) -> None:
    curves = {}
    for name in ("bf16", *scalings):
        changes = {} if name == "bf16" else {"precision": precision_of(name), "precision__scaling": name}
        made = settings(
            place / "source", place / "text.txt", tmp_path / name, train__steps=20, train__save_every=20, **changes
        )
        _, _, seen = run(made)
        curves[name] = seen
    assert curves["bf16"][-1] < 0.7 * curves["bf16"][0]
    for name in scalings:
        assert curves[name] != curves["bf16"]
        assert curves[name][0] == pytest.approx(curves["bf16"][0], rel=0.1 * near)
        assert sum(curves[name]) == pytest.approx(sum(curves["bf16"]), rel=near)


def test_nvfp4_that_is_killed_rounds_its_gradients_as_it_would_have(place: Path, tmp_path: Path) -> None:
    """At random, but by seed, step and pass alone, whatever has been drawn before."""
    whole = settings(place / "source", place / "text.txt", tmp_path / "whole", "nvfp4", train__steps=3)
    run(whole)
    run_with_kills(replace(whole, out=tmp_path / "killed"), {1, 3})
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    last = "iter_0000003"
    assert contents(tmp_path / "killed" / last) == contents(tmp_path / "whole" / last)


@pytest.mark.parametrize(
    ("precision", "changes", "said"),
    [
        ("fp8", {"recipe": "nvfp4"}, "--precision fp8, but precision.scaling = nvfp4 is NVFP4.*--precision nvfp4"),
        ("nvfp4", {"recipe": "fp8-block"}, "= block is FP8.*--precision fp8, or --set precision.scaling=nvfp4"),
        ("nvfp4", {"precision__scaling": "mxfp8"}, "--precision nvfp4, but precision.scaling = mxfp8 is FP8"),
        ("nvfp4", {"cold_start": True}, "--cold-start empties the state of delayed scaling, and this run keeps none"),
        ("nvfp4", {"collect_amax": True}, "--collect-amax is for BF16 runs, and this one is in NVFP4"),
    ],
)
def test_what_does_not_go_with_nvfp4_is_refused(
    place: Path, tmp_path: Path, precision: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(RecipeError, match=said):
        dry_run(settings(place / "source", place / "text.txt", tmp_path / "run", precision, **changes))


def test_a_run_in_nvfp4_is_told_of_and_gone_on_with_in_fp8_and_back(place: Path, tmp_path: Path) -> None:
    """What goes on in other codes takes none of its settings."""
    kept = {"precision__num_layers_at_end_in_bf16": 1}
    whole = settings(place / "source", place / "text.txt", tmp_path / "run", "nvfp4", train__steps=1, **kept)
    _, finished, _ = run(whole)
    described = report.describe(open_checkpoint(finished.checkpoint))
    assert described["run"]["scaling"] == "nvfp4"
    assert ("goes on in", "NVFP4, by precisionctl/run.json") in report.tables(described)[0].rows
    on = replace(
        whole,
        checkpoint=finished.checkpoint,
        out=tmp_path / "on",
        load="weights",
        overrides=("data.sequence_length=32",),
    )
    planned = dry_run(on).plan
    assert (planned.recipe.precision.scaling, planned.recipe.precision.num_layers_at_end_in_bf16) == ("nvfp4", 1)
    assert planned.precision_notes[0].startswith("NVFP4 settings from precisionctl/run.json: ")
    assert run_report.computed(planned) == "NVFP4 emulated in PyTorch"
    other = dry_run(replace(on, precision="fp8")).plan
    assert other.recipe.precision == PRESETS["fp8-delayed"] and not other.precision_notes


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
    with pytest.raises(RecipeError, match=r"^.{,200}leave none of 3 for FP8"):
        Precision(fp8=True, num_layers_at_end_in_bf16=10**400).of_layers(3)


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
