"""A run goes on in the FP8 precision of the run before it, unless a recipe is named."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import calibrating
import pytest
from conversions import change_args, run as convert
from training import SMALL, make_place, run, settings

from precisionctl.calibration.calibrate import calibrate
from precisionctl.checkpoints.megatron.directory import of_megatron
from precisionctl.checkpoints.megatron.keys import RUN_FILE
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.commands.run_precision import precision_of_run
from precisionctl.conversion import manifest
from precisionctl.errors import RecipeError
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import DelayedScaling
from precisionctl.launch.base import LaunchSource
from precisionctl.megatron_flags import keys_of
from precisionctl.precision import PRESETS, BlockScaling, Phase, Precision
from precisionctl.reports.inspect import describe, tables
from precisionctl.trainer.resume import Settings, Started
from precisionctl.trainer.run_plan import dry_run

OTHER = {"precision__delayed__amax_compute_algo": "most_recent", "precision__delayed__margin": 1, "train__steps": 1}
"""Settings that no bundled recipe has."""
SAID = "precision.delayed.margin 1, precision.delayed.amax_history_len 4, "
SAID += "precision.delayed.amax_compute_algo most_recent"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source, a run in `delayed` scaling under other settings than the recipes', one in `block`
    scaling, and the source in Megatron's layout."""
    folder = make_place(tmp_path_factory.mktemp("precision"))
    run(settings(folder / "source", folder / "text.txt", folder / "delayed", "fp8", **OTHER))
    stateless = {"precision__scaling": "block", "precision__keep_bf16": '["*.linear_proj"]'}
    run(settings(folder / "source", folder / "text.txt", folder / "block", "fp8", train__steps=1, **stateless))
    convert(folder / "source", folder / "megatron", "megatron")
    return folder


def asked(source: Path, place: Path, out: Path, precision: str = "fp8", **changes: Any) -> Settings:
    """Settings that say nothing on FP8 but what `changes` do."""
    made = settings(source, place / "text.txt", out, precision, load="weights", train__steps=1, **changes)
    said = {key for key in SMALL if key.startswith("precision.")}
    own = {key.replace("__", ".") for key in changes}
    overrides = [each for each in made.overrides if each.partition("=")[0] not in said - own]
    return Settings(**{**vars(made), "overrides": tuple(overrides)})


def told(started: Started) -> list[str]:
    return [note for note in started.notes if note.startswith("FP8 settings")]


def test_without_a_recipe_delayed_scaling_has_the_settings_of_the_run_before(place: Path, tmp_path: Path) -> None:
    started, finished, _ = run(asked(place / "delayed", place, tmp_path / "run"))
    assert told(started) == [
        f"FP8 settings from precisionctl/run.json and the FP8 state: {SAID}; --recipe gives others"
    ]
    delayed = started.plan.recipe.precision.delayed
    assert delayed == DelayedScaling(1, amax_history_len=4, amax_compute_algo="most_recent")
    assert not any("the FP8 state is of a run with" in note for note in started.notes)
    states = open_checkpoint(finished.checkpoint).fp8
    assert states is not None and states.recipe == delayed
    again, _, _ = run(asked(place / "delayed", place, tmp_path / "run"))
    assert again.continues and again.plan.recipe == started.plan.recipe and not told(again)


def test_by_way_of_hugging_face_the_state_says_them_with_or_without_a_manifest(place: Path, tmp_path: Path) -> None:
    convert(place / "delayed", tmp_path / "hf", "hf")
    said = "FP8 settings from {}the FP8 state: " + f"{SAID}; --recipe gives others"
    planned = dry_run(asked(tmp_path / "hf", place, tmp_path / "run")).plan
    assert planned.precision_notes == (said.format("precisionctl/manifest.json and "),)
    (tmp_path / "hf" / manifest.RELATIVE).unlink()
    planned = dry_run(asked(tmp_path / "hf", place, tmp_path / "run")).plan
    assert planned.precision_notes == (said.format(""),)


def test_a_recipe_and_set_count_before_the_run_before(place: Path, tmp_path: Path) -> None:
    named, _, _ = run(asked(place / "delayed", place, tmp_path / "named", recipe="fp8-delayed"))
    assert named.plan.recipe.precision.delayed == DelayedScaling() and not told(named)
    assert any("the FP8 state is of a run with margin 1, amax_history_len 4, amax_comp" in note for note in named.notes)
    planned = dry_run(asked(place / "delayed", place, tmp_path / "a", precision__delayed__margin=2)).plan
    assert planned.recipe.precision.delayed == DelayedScaling(2, amax_history_len=4, amax_compute_algo="most_recent")
    other = dry_run(asked(place / "delayed", place, tmp_path / "b", precision__scaling="block")).plan
    assert other.recipe.precision == Precision(fp8=True, scaling="block") and not other.precision_notes


def test_state_that_is_not_of_these_weights_or_is_skipped_says_nothing(place: Path, tmp_path: Path) -> None:
    convert(place / "delayed", tmp_path / "hf", "hf")
    skips = {"skip": ("fp8",)}
    (note,) = dry_run(asked(tmp_path / "hf", place, tmp_path / "a", **skips)).plan.precision_notes
    assert note == f"FP8 settings from precisionctl/manifest.json: {SAID}; --recipe gives others"
    (tmp_path / "hf" / manifest.RELATIVE).unlink()
    assert dry_run(asked(tmp_path / "hf", place, tmp_path / "a", **skips)).plan.precision_notes == ()
    run(asked(tmp_path / "hf", place, tmp_path / "other", "bf16"))  # which carries the state
    planned = dry_run(asked(tmp_path / "other", place, tmp_path / "b")).plan
    assert planned.known.outdated is not None
    assert planned.recipe.precision == Precision(fp8=True) and planned.precision_notes == ()


def test_collected_amaxes_go_on_under_the_settings_of_their_state(place: Path, tmp_path: Path) -> None:
    convert(place / "delayed", tmp_path / "hf", "hf")
    started, _, _ = run(asked(tmp_path / "hf", place, tmp_path / "a", "bf16", collect_amax=True))
    assert started.plan.recipe.precision.delayed.amax_history_len == 4 and told(started)
    plain = dry_run(asked(tmp_path / "hf", place, tmp_path / "b", "bf16")).plan
    assert plain.recipe.precision == Precision(fp8=False) and plain.precision_notes == ()


def test_amaxes_are_collected_for_delayed_scaling_whatever_the_run_before_was_in(place: Path, tmp_path: Path) -> None:
    planned = dry_run(asked(place / "block", place, tmp_path / "run", "bf16", collect_amax=True)).plan
    assert planned.recipe.precision == Precision(fp8=False) and planned.precision_notes == ()


def test_a_file_of_state_brings_the_recipe_it_was_recorded_under_and_not_before_the_checkpoint_s(
    place: Path, tmp_path: Path
) -> None:
    calibrate(calibrating.asked(place, tmp_path / "state"))
    given = {"fp8_state": tmp_path / "state"}
    planned = dry_run(asked(place / "source", place, tmp_path / "a", **given)).plan
    assert planned.recipe.precision.delayed.amax_history_len == calibrating.HISTORY
    planned = dry_run(asked(place / "delayed", place, tmp_path / "b", **given)).plan
    assert planned.recipe.precision.delayed.amax_history_len == 4
    planned = dry_run(asked(place / "block", place, tmp_path / "c", **given)).plan
    assert planned.recipe.precision == Precision(fp8=True, delayed=DelayedScaling(amax_history_len=calibrating.HISTORY))


def test_a_run_of_ours_without_state_goes_on_as_it_was(place: Path, tmp_path: Path) -> None:
    started, _, _ = run(asked(place / "block", place, tmp_path / "run"))
    expected = Precision(True, "block", DelayedScaling(amax_history_len=4), keep_bf16=("*.linear_proj",))
    assert started.plan.recipe.precision == expected
    (said,) = told(started)
    assert said.startswith("FP8 settings from precisionctl/run.json: precision.scaling block, ")
    assert "precision.keep_bf16 ('*.linear_proj',)" in said
    with pytest.raises(RecipeError, match="--cold-start empties the state of delayed scaling, and this run keeps none"):
        dry_run(asked(place / "block", place, tmp_path / "cold", cold_start=True))


MEGATRONS = {"fp8_margin": 0, "fp8_amax_history_len": 1, "fp8_amax_compute_algo": "most_recent"}
"""What Megatron stores, whatever the recipe."""
ENDS = {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, Precision(fp8=True, scaling="current")),
        (
            {"fp8": "e4m3", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True},
            Precision(
                fp8=True,
                scaling="current",
                delayed=DelayedScaling(fp8_format="E4M3"),
                num_layers_at_start_in_bf16=1,
                num_layers_at_end_in_bf16=1,
            ),
        ),
        (
            {"fp8": "hybrid", "fp8_recipe": "blockwise", "first_last_layers_bf16": False},
            Precision(fp8=True, scaling="block", block=BlockScaling("HYBRID")),
        ),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp4": None, "fp4_recipe": "nvfp4"}, PRESETS["mxfp8"]),
        ({"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp8": None, "fp8_recipe": "delayed"}, PRESETS["nvfp4"]),
        (
            {"fp4": "e2m1", "fp4_recipe": "nvfp4", "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 1},
            replace(PRESETS["nvfp4"], num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1),
        ),
        (
            {"fp8": "hybrid", "fp8_recipe": "delayed"},
            Precision(fp8=True, delayed=DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")),
        ),
        (
            {"fp8": "hybrid"},  # of before there were recipes
            Precision(fp8=True, delayed=DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")),
        ),
    ],
)
def test_megatron_s_arguments_mean_what_its_flags_do(
    place: Path, tmp_path: Path, given: dict[str, Any], expected: Precision
) -> None:
    shutil.copytree(place / "megatron", tmp_path / "megatron")
    change_args(tmp_path / "megatron" / "release", **{**MEGATRONS, **ENDS, **given})
    found = precision_of_run(open_checkpoint(tmp_path / "megatron"))
    assert found is not None and found.precision == expected


@pytest.mark.parametrize(
    "given",
    [{"fp8": None, "fp8_recipe": "tensorwise"}, {"fp8_recipe": "delayed"}, {"fp8": "hybrid", "fp8_recipe": "custom"}]
    + [{"fp8": "hybrid", "fp8_recipe": ["tensorwise"]}, {"fp8": b"hybrid"}]
    + [{"fp4": None, "fp4_recipe": "nvfp4"}, {"fp4": "e2m1", "fp4_recipe": "custom"}, {"fp4": "e3m0"}]
    + [{"fp8": "hybrid", "fp8_margin": 10**5000}, {"fp8": "hybrid", "fp8_margin": "0"}],
)
def test_arguments_of_a_run_in_bf16_or_of_another_kind_mean_none(given: dict[str, Any]) -> None:
    assert not keys_of({**MEGATRONS, **ENDS, **given})


def test_a_megatron_run_without_state_goes_on_as_its_arguments_say(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "megatron", tmp_path / "megatron")
    change_args(tmp_path / "megatron" / "release", fp8="hybrid", fp8_recipe="tensorwise", **MEGATRONS, **ENDS)
    started, _, _ = run(asked(tmp_path / "megatron", place, tmp_path / "run"))
    assert started.plan.recipe.precision == Precision(fp8=True, scaling="current")
    said = "FP8 settings from Megatron's arguments: precision.scaling current; --recipe gives others"
    assert told(started) == [said] and started.fp8 == {}
    reader = open_checkpoint(tmp_path / "megatron")
    assert LaunchSource(reader, tmp_path / "megatron").stateless == Precision(fp8=True, scaling="current")
    found = describe(reader)
    assert found["run"]["scaling"] == "current" and found["run"]["said_by"] == "Megatron's arguments"
    assert ("goes on in", "FP8 with current scaling, by Megatron's arguments") in tables(found)[0].rows


def test_arguments_of_which_no_recipe_can_be_made_are_left_alone(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "megatron", tmp_path / "megatron")
    change_args(tmp_path / "megatron" / "release", fp8="hybrid", fp8_recipe="delayed", fp8_margin=10**6)
    assert describe(open_checkpoint(tmp_path / "megatron"))["run"] is None
    planned = dry_run(asked(tmp_path / "megatron", place, tmp_path / "run")).plan
    assert planned.recipe.precision == Precision(fp8=True)
    (note,) = planned.precision_notes
    assert note.startswith("What precision the run was in is not known: ") and "fp8_margin 1000000" in note


@pytest.fixture(scope="module")
def in_fp4(place: Path) -> Path:
    """A run in NVFP4, but for its last layer."""
    ends = {"precision__num_layers_at_end_in_bf16": 1, "train__steps": 1}
    return run(settings(place / "source", place / "text.txt", place / "nvfp4", "nvfp4", **ends))[1].checkpoint


@pytest.mark.parametrize("options", [{}, {"container": "torch"}, {"drop_optimizer": True}], ids=str)
def test_a_run_in_nvfp4_is_one_by_megatron_s_arguments_too(
    in_fp4: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    notes = convert(in_fp4, tmp_path / "megatron", "megatron", **options).notes
    reader, expected = open_checkpoint(tmp_path / "megatron"), replace(PRESETS["nvfp4"], num_layers_at_end_in_bf16=1)
    assert of_megatron(reader) and reader.args["first_last_layers_bf16"] is True
    assert {name: reader.args[name] for name in ("fp4", "fp4_recipe", *ENDS)} == {
        "fp4": "e2m1",
        "fp4_recipe": "nvfp4",
        "num_layers_at_start_in_bf16": 0,
        "num_layers_at_end_in_bf16": 1,
    }
    for said_by in ("precisionctl/manifest.json", "Megatron's arguments"):
        found = precision_of_run(reader)
        assert found is not None and found.said_by == said_by
        assert (
            replace(found.precision, delayed=DelayedScaling()) == expected
        )  # whose settings a run in NVFP4 has no use for
        (reader.path / manifest.RELATIVE).unlink(missing_ok=True)  # which another program's checkpoints do not have
    assert LaunchSource(reader, tmp_path / "megatron").stateless == expected
    assert not any("has no arguments" in note or "The run was" in note for note in notes)


def test_what_megatron_s_arguments_cannot_say_of_a_run_is_noted(place: Path, tmp_path: Path) -> None:
    said = (
        "Other programs are not told of precision.{}: precisionctl/manifest.json says it to `resume --precision fp8`."
    )
    notes = convert(place / "block", tmp_path / "megatron", "megatron").notes
    assert said.format("keep_bf16 *.linear_proj") in notes
    reader = open_checkpoint(tmp_path / "megatron")
    assert reader.path
    (reader.path / manifest.RELATIVE).unlink()
    found = precision_of_run(reader)
    assert found is not None and found.precision == Precision(fp8=True, scaling="block")
    given = {"precision__block__use_f32_scales": "true", "precision__scaling": "block", "train__steps": 1}
    run(settings(place / "source", place / "text.txt", tmp_path / "f32", "fp8", **given))
    notes = convert(tmp_path / "f32", tmp_path / "by_megatron", "megatron").notes
    assert said.format("block.use_f32_scales") in notes


def test_a_version_of_te_is_said_to_change_nothing_where_no_state_is_written(
    place: Path, in_fp4: Path, tmp_path: Path
) -> None:
    said = "--te-version changes nothing: the result has no state of Transformer Engine."
    for source, precision, written in (
        (in_fp4, "fp8", False),
        (in_fp4, "keep", False),
        (place / "delayed", "fp8", True),
    ):
        request = Request(source, tmp_path / "out", "megatron", precision, te_version=1)
        assert (said in plan_command(request).notes) is not written
        assert said not in plan_command(replace(request, te_version=2)).notes


@pytest.mark.parametrize("to", [{}, {"container": "dcp"}], ids=str)
def test_where_the_manifest_alone_says_the_precision_of_a_run_without_state_a_note_does(
    place: Path, in_fp4: Path, tmp_path: Path, to: dict[str, Any]
) -> None:
    said = "The run was in NVFP4: `resume --precision nvfp4` goes on in it, by precisionctl/manifest.json, which other "
    said += "programs do not read."
    assert said in convert(in_fp4, tmp_path / "nvfp4", "hf", **to).notes
    of_delayed = convert(place / "delayed", tmp_path / "delayed", "hf", **to).notes
    assert not any("The run was" in note for note in of_delayed), "its state says it"


def test_an_export_of_a_run_is_in_its_precision(place: Path, in_fp4: Path, tmp_path: Path) -> None:
    notes = plan_command(Request.export(in_fp4, tmp_path / "export", "vllm")).notes
    (scheme,) = [note for note in notes if note.startswith("Scheme ")]
    assert scheme.startswith("Scheme nvfp4a16: the run was in NVFP4, and ")
    assert any("linears stay in BF16, e.g. `model.layers." in note for note in notes), "its last layer"
    notes = plan_command(Request.export(place / "delayed", tmp_path / "export", "vllm")).notes
    assert not any("The run was" in note or "the run was" in note for note in notes)


@pytest.mark.parametrize("last", ["true", "false"])
def test_a_run_with_phases_was_in_the_precision_of_its_last_step(place: Path, tmp_path: Path, last: str) -> None:
    first = "false" if last == "true" else "true"
    phases = f"[{{until = 0.5, fp8 = {first}}}, {{fp8 = {last}}}]"
    given = {"precision__scaling": "block", "precision__schedule": phases, "train__steps": 2}
    run(settings(place / "source", place / "text.txt", tmp_path / "run", "fp8", **given))
    source, said = tmp_path / "run", "un was in FP8 with 128-block scaling"
    convert(source, tmp_path / "kept", "megatron")
    for each in (source, tmp_path / "kept"):
        exported = plan_command(Request.export(each, tmp_path / "export", "vllm", keep_misfits=True))
        converted = plan_command(Request(each, tmp_path / "hf", "hf"))
        for command in (exported, converted):
            assert any(said in note for note in command.notes) is (last == "true")


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-delayed"])
def test_phases_of_a_recipe_are_named_as_what_megatron_has_no_argument_for(
    place: Path, tmp_path: Path, recipe: str
) -> None:
    with_phases = replace(PRESETS[recipe], schedule=(Phase(0.5), Phase(fp8=False)))
    request = Request(place / "source", tmp_path / "made", "megatron", "fp8", recipe=with_phases)
    said = "Megatron has no arguments for precision.schedule: `resume --set` gives them again."
    assert said in plan_command(request).notes


@pytest.mark.parametrize("said", [{"precision.nvfp4.new_key": 1}, {"precision.scaling": "fp2"}], ids=str)
def test_words_of_a_run_that_are_not_known_here_stop_only_what_takes_them(
    in_fp4: Path, tmp_path: Path, said: dict[str, Any]
) -> None:
    """Such as a later version's. Weights and optimizer do not depend on them."""
    (word,) = said
    shutil.copytree(in_fp4, tmp_path / "run")
    file = tmp_path / "run" / RUN_FILE
    saved = json.loads(file.read_text())
    file.write_text(json.dumps({**saved, "identity": {**saved["identity"], **said}}))
    for to in ({}, {"container": "dcp"}):
        notes = convert(tmp_path / "run", tmp_path / f"made {to}", "hf", **to).notes
        (note,) = [note for note in notes if note.startswith("What precision the run was in is not known: ")]
        assert word in note
    exported = plan_command(Request.export(tmp_path / "run", tmp_path / "export", "vllm", keep_misfits=True))
    assert f"{note} What it kept in BF16 may become codes." in exported.notes
    with pytest.raises(RecipeError, match=rf"{word}.*--precision bf16 leaves the run's precision out"):
        convert(tmp_path / "run", tmp_path / "megatron", "megatron")
    convert(tmp_path / "run", tmp_path / "megatron", "megatron", "bf16")


def test_a_result_in_another_precision_than_the_run_says_nothing_of_the_run_s(in_fp4: Path, tmp_path: Path) -> None:
    for precision, recipe in (("bf16", None), ("fp8", PRESETS["fp8-delayed"])):
        made = convert(in_fp4, tmp_path / precision, "megatron", precision, recipe=recipe)
        assert not any("has no arguments" in note or "The run was" in note for note in made.notes)
        found = precision_of_run(open_checkpoint(tmp_path / precision))
        assert found is None if precision == "bf16" else found and found.precision.keeps_state


def test_a_result_for_fp8_goes_on_as_the_run_did_unless_a_recipe_is_given(
    place: Path, in_fp4: Path, tmp_path: Path
) -> None:
    """As `resume` does, with the same note."""
    for source in (in_fp4, place / "block"):
        made = convert(source, tmp_path / source.name, "megatron", "fp8")
        found, before = (precision_of_run(open_checkpoint(each)) for each in (tmp_path / source.name, source))
        assert found is not None and before is not None and open_checkpoint(tmp_path / source.name).fp8 is None
        assert found.precision == before.precision and found.trained
        assert any("keeps no state, so the weights are those of --precision bf16" in note for note in made.notes)
        said = (
            f"{found.precision.codes} settings from precisionctl/run.json: precision.scaling {found.precision.scaling}"
        )
        (note,) = [note for note in made.notes if note.startswith(said)]
        assert ("precision.num_layers_at_end_in_bf16 1" in note) is (source == in_fp4)


def test_new_state_is_under_the_settings_of_the_run_before(place: Path, tmp_path: Path) -> None:
    convert(place / "delayed", tmp_path / "delayed", "megatron", "fp8", drop_fp8_state=True)
    states = open_checkpoint(tmp_path / "delayed").fp8
    assert states is not None
    assert states.recipe == DelayedScaling(1, amax_history_len=4, amax_compute_algo="most_recent")


@pytest.mark.parametrize("source", ["source", "delayed", "nvfp4"])
@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (
            replace(PRESETS["fp8-block"], num_layers_at_start_in_bf16=1, keep_bf16=("*.linear_proj",)),
            {"fp8": "e4m3", "fp8_recipe": "blockwise", "first_last_layers_bf16": True},
        ),
        (PRESETS["fp8-current"], {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
        (PRESETS["nvfp4"], {"fp4": "e2m1", "fp4_recipe": "nvfp4"}),
    ],
    ids=["block", "current", "nvfp4"],
)
@pytest.mark.parametrize("container", ["torch_dist", pytest.param("torch", marks=pytest.mark.soak)])
def test_a_recipe_without_state_is_in_megatron_s_arguments_from_which_a_run_goes_on(
    place: Path, in_fp4: Path, tmp_path: Path, source: str, recipe: Precision, expected: dict[str, Any], container: str
) -> None:
    """`expected` are Megatron's own words (megatron-core 0.19, TransformerConfig: fp8, fp8_recipe, fp4, fp4_recipe)."""
    given = in_fp4 if source == "nvfp4" else place / source
    notes = convert(given, tmp_path / "made", "megatron", "fp8", recipe=recipe, container=container).notes
    reader = open_checkpoint(tmp_path / "made")
    assert of_megatron(reader) and expected.items() <= reader.args.items()
    assert not reader.args.get("fp4" if "fp8" in expected else "fp8"), "Megatron refuses both"
    assert bool(reader.args.get("first_last_layers_bf16")) is ("first_last_layers_bf16" in expected)
    said, unsaid = replace(recipe, keep_bf16=()), "Megatron has no arguments for precision.keep_bf16 *.linear_proj: "
    assert LaunchSource(reader, tmp_path / "made").stateless == said
    resumed = asked(tmp_path / "made", place, tmp_path / "run", recipe.option)
    assert dry_run(resumed).plan.recipe.precision == said
    (note,) = [note for note in notes if "keeps no state" in note]
    assert f"`resume --precision {recipe.option}` goes on in it" in note and "launch-args" not in note
    assert any(note.startswith(unsaid) for note in notes) is bool(recipe.keep_bf16)
    convert(tmp_path / "made", tmp_path / "bf16", "megatron", "bf16")
    assert precision_of_run(open_checkpoint(tmp_path / "bf16")) is None


@pytest.mark.parametrize("given", [{"fp4": "e2m1", "fp4_recipe": "nvfp4"}, {"fp8": "hybrid", "fp8_recipe": "mxfp8"}])
@pytest.mark.parametrize("container", ["torch_dist", "torch"])
def test_another_precision_takes_megatron_s_out_of_its_arguments(
    place: Path, tmp_path: Path, container: str, given: dict[str, Any]
) -> None:
    before = tmp_path / "before"
    convert(place / "delayed", before, "megatron", drop_fp8_state=True)
    change_args(next(before.glob("iter_*")), **{"fp8": None, "first_last_layers_bf16": True, **given})
    convert(before, tmp_path / "kept", "megatron", container=container)
    kept = open_checkpoint(tmp_path / "kept")
    assert of_megatron(kept) and given.items() <= kept.args.items() and kept.args["first_last_layers_bf16"] is True
    for precision in ("bf16", "fp32"):
        convert(before, tmp_path / precision, "megatron", precision, container=container)
        reader = open_checkpoint(tmp_path / precision)
        assert of_megatron(reader) and not reader.args["first_last_layers_bf16"]
        assert [reader.args[name] for name in ("fp8", "fp4") if name in reader.args] == [None]
        assert precision_of_run(reader) is None
    of_delayed = PRESETS["fp8-delayed"]
    convert(before, tmp_path / "fp8", "megatron", "fp8", container=container, recipe=of_delayed)  # with new state
    found = precision_of_run(open_checkpoint(tmp_path / "fp8"))
    assert found is not None and found.precision.keeps_state


def test_state_that_is_given_takes_another_scaling_out_of_megatron_s_arguments(place: Path, tmp_path: Path) -> None:
    """Megatron refuses a run in FP8 and FP4 at once."""
    convert(place / "delayed", tmp_path / "before", "megatron", drop_fp8_state=True)
    change_args(tmp_path / "before" / "iter_0000001", fp8=None, fp4="e2m1", fp4_recipe="nvfp4")
    convert(place / "delayed", tmp_path / "hf", "hf")
    convert(tmp_path / "before", tmp_path / "made", "megatron", fp8_state=tmp_path / "hf" / sidecar.RELATIVE)
    reader = open_checkpoint(tmp_path / "made")
    assert of_megatron(reader) and (reader.args["fp8"], reader.args["fp4"]) == ("hybrid", None)
