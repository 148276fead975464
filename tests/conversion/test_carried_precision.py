"""A result says in its manifest which precision the run was in, as long as its weights are those of that run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conversions import carry_out, run as convert
from safetensors.torch import load_file, save_file
from training import make_place, run, settings

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.commands.run_precision import precision_of_run
from precisionctl.commands.storage import DCP, DEEPSPEED, TORCHTITAN
from precisionctl.conversion import manifest
from precisionctl.errors import DamagedCheckpoint
from precisionctl.reports.inspect import describe, tables
from precisionctl.trainer.resume import Settings
from precisionctl.trainer.run_plan import dry_run

ENDS = {"precision__num_layers_at_end_in_bf16": 1}
CONTAINERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "hf": ("hf", {"precision": "bf16"}),
    "torch_dist": ("megatron", {}),
    "torch": ("megatron", {"container": "torch"}),
    "dcp": ("hf", {"container": DCP}),
    "deepspeed": ("hf", {"container": DEEPSPEED}),
    "torchtitan": ("hf", {"container": TORCHTITAN}),
}
OUTDATED = "precisionctl/manifest.json says the precision of a run, of other weights than these: it is not used."


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in delayed scaling, and one in 128-blocks, that kept layers or modules in BF16."""
    folder = make_place(tmp_path_factory.mktemp("carried"))
    given = {"delayed": ENDS, "block": {"precision__scaling": "block", "precision__keep_bf16": '["*.linear_proj"]'}}
    for name, keys in given.items():
        run(settings(folder / "source", folder / "text.txt", folder / name, "fp8", train__steps=1, **keys))
    return folder


def goes_on(source: Path, place: Path, out: Path) -> tuple[Any, tuple[str, ...]]:
    """The precision in which `resume --precision fp8` goes on, and its notes."""
    small = settings(source, place / "text.txt", out, "fp8", load="weights", train__steps=1)
    overrides = tuple(each for each in small.overrides if not each.startswith("precision."))
    plan = dry_run(Settings(**{**vars(small), "overrides": overrides})).plan
    return plan.recipe.precision, plan.precision_notes


def in_bf16(source: Path, out: Path) -> set[str]:
    """The linears of layers that an export leaves in BF16."""
    command = plan_command(Request.export(source, out, "vllm", keep_misfits=True))
    linears = {name for name in command.plan.targets if ".layers." in name and name.endswith("_proj.weight")}
    return linears - set(command.plan.codes)


@pytest.mark.parametrize("container", CONTAINERS)
def test_what_a_run_in_delayed_scaling_kept_in_bf16_is_known_of_every_result(
    place: Path, tmp_path: Path, container: str
) -> None:
    to, options = CONTAINERS[container]
    notes = convert(place / "delayed", tmp_path / "made", to, **options).notes
    found, before = (precision_of_run(open_checkpoint(each)) for each in (tmp_path / "made", place / "delayed"))
    assert found and before and (found.precision, found.trained) == (before.precision, True)
    assert found.said_by == str(manifest.RELATIVE)
    assert any("num_layers_at_end_in_bf16 1" in note and str(manifest.RELATIVE) in note for note in notes)
    kept = in_bf16(place / "delayed", tmp_path / "export")
    assert {name for name in kept if ".layers.1." in name} and kept == in_bf16(tmp_path / "made", tmp_path / "export")
    assert not any(".layers.0." in name for name in kept)
    precision, _ = goes_on(tmp_path / "made", place, tmp_path / "run")
    assert precision.num_layers_at_end_in_bf16 == 1 and precision.delayed == before.precision.delayed


def test_a_scaling_without_state_is_known_too_with_what_megatron_has_no_argument_for(
    place: Path, tmp_path: Path
) -> None:
    convert(place / "block", tmp_path / "hf", "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", "megatron")
    before = precision_of_run(open_checkpoint(place / "block"))
    assert before and before.precision.keep_bf16 == ("*.linear_proj",)
    for name in ("hf", "megatron"):
        found = precision_of_run(open_checkpoint(tmp_path / name))
        assert found and found.precision == before.precision
        notes = plan_command(Request.export(tmp_path / name, tmp_path / "export", "vllm", keep_misfits=True)).notes
        assert any("un was in FP8 with 128-block scaling" in note for note in notes)
        assert goes_on(tmp_path / name, place, tmp_path / "run")[0].keep_bf16 == ("*.linear_proj",)
        rows = tables(describe(open_checkpoint(tmp_path / name)))[0].rows
        assert ("goes on in", f"FP8 with 128-block scaling, by {manifest.RELATIVE}") in rows


def test_weights_that_were_changed_since_are_not_the_run_s(place: Path, tmp_path: Path) -> None:
    """As by a program that saves into the same directory, or that copies all of it beside weights of its own."""
    convert(place / "delayed", tmp_path / "hf", "hf")
    file = tmp_path / "hf" / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.mlp.down_proj.weight"
    save_file({**weights, name: weights[name] * 2}, file, {"format": "pt"})
    assert precision_of_run(open_checkpoint(tmp_path / "hf")) is None
    precision, notes = goes_on(tmp_path / "hf", place, tmp_path / "run")
    assert precision.num_layers_at_end_in_bf16 == 0 and OUTDATED in notes
    for request in (
        Request(tmp_path / "hf", tmp_path / "again", "hf"),
        Request(tmp_path / "hf", tmp_path / "again", "megatron"),
        Request(tmp_path / "hf", tmp_path / "again", "megatron", "fp8"),
        Request.export(tmp_path / "hf", tmp_path / "again", "vllm", keep_misfits=True),
    ):
        assert any(note.startswith(OUTDATED) for note in plan_command(request).notes)
    convert(tmp_path / "hf", tmp_path / "again", "hf")
    assert "run" not in json.loads((tmp_path / "again" / manifest.RELATIVE).read_text()), "nor is it handed on"


def test_an_export_that_comes_back_and_is_made_again_has_the_same_weights_in_bf16(place: Path, tmp_path: Path) -> None:
    """Its weights are those that its codes decode to, and its manifest is of these."""
    request = Request.export(place / "delayed", tmp_path / "export", "vllm", "dynamic", keep_misfits=True)
    carry_out(request, workers=1)
    convert(tmp_path / "export", tmp_path / "megatron", "megatron")
    kept = in_bf16(place / "delayed", tmp_path / "out")
    assert kept == in_bf16(tmp_path / "export", tmp_path / "out") == in_bf16(tmp_path / "megatron", tmp_path / "out")


def test_another_precision_that_is_asked_for_leaves_the_run_s_out(place: Path, tmp_path: Path) -> None:
    """Unless it keeps the state of delayed scaling, with which a run in FP8 may go on."""
    for name, precision, known in (("block", "bf16", False), ("delayed", "bf16", True), ("delayed", "fp32", True)):
        out = tmp_path / f"{name}-{precision}"
        convert(place / name, out, "megatron", precision)
        assert (precision_of_run(open_checkpoint(out)) is not None) is known
    convert(place / "delayed", tmp_path / "dropped", "megatron", "bf16", drop_fp8_state=True)
    assert precision_of_run(open_checkpoint(tmp_path / "dropped")) is None


@pytest.mark.parametrize("said", [[], {"keys": {}}, {"keys": {}, "trained": 1, "of_weights": ""}], ids=str)
def test_a_manifest_of_another_making_is_refused_by_its_name(place: Path, tmp_path: Path, said: Any) -> None:
    shutil.copytree(place / "source", tmp_path / "hf")
    (tmp_path / "hf" / manifest.RELATIVE).parent.mkdir()
    (tmp_path / "hf" / manifest.RELATIVE).write_text(json.dumps({"run": said}))
    with pytest.raises(DamagedCheckpoint, match="does not say which run the weights are of"):
        precision_of_run(open_checkpoint(tmp_path / "hf"))
    convert(tmp_path / "hf", tmp_path / "bf16", "megatron", "bf16")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, []) for key in ("optimizer.lr", "train.steps", "data.train", "precision.schedule")),
        ("precision.delayed", {"margin": 2}),
    ],
)
def test_a_manifest_cannot_set_anything_but_the_precision_of_a_run_that_goes_on(
    place: Path, tmp_path: Path, key: str, value: Any
) -> None:
    convert(place / "delayed", tmp_path / "hf", "hf")
    file = tmp_path / "hf" / manifest.RELATIVE
    content = json.loads(file.read_text())
    content["run"]["keys"][key] = value
    file.write_text(json.dumps(content))
    with pytest.raises(DamagedCheckpoint, match=f"`{key}` among the settings of a run's precision"):
        goes_on(tmp_path / "hf", place, tmp_path / "run")
