"""The scheme that an export chooses for the checkpoint of a run in FP8 or NVFP4: that in which the run computed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import in_memory
import pico
import pytest
import torch
from conversions import as_iteration, carry_out, change_args, run as convert
from safetensors.torch import load_file

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.megatron.keys import RUN_FILE
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.commands.run_precision import precision_of_export, precision_of_run
from precisionctl.commands.source import Source
from precisionctl.engines.base import engine_named
from precisionctl.errors import MissingFp8State, PrecisionError
from precisionctl.fp8 import sidecar
from precisionctl.precision import PRESETS, BlockScaling
from precisionctl.verify.compare import compare
from precisionctl.verify.engine_rules import check

WHOLE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
"""A Llama of which every linear is whole blocks."""
NVFP4 = {"fp4": "e2m1", "fp4_recipe": "nvfp4"}
BLOCK = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
MXFP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
CURRENT = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed"}
LAST = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 1}
"""Megatron's arguments of a run that kept its last layer in BF16."""
ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
MLP = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in both layouts and, as `state`, amaxes of its inputs."""
    folder = tmp_path_factory.mktemp("of_runs")
    pico.save(folder / "hf", dtype=torch.bfloat16, **WHOLE)
    convert(folder / "hf", folder / "megatron", "megatron")
    sidecar.write(folder / "state", in_memory.recorded(HuggingFaceReader(folder / "hf")))
    return folder


def of_run(place: Path, folder: Path, **args: Any) -> Path:
    """The checkpoint as Megatron's run with these arguments would have it."""
    shutil.copytree(place / "megatron", folder)
    change_args(as_iteration(folder, 3), **args)
    return folder


def chosen(source: Path, target: str = "vllm", **options: Any) -> str:
    work = plan_command(Request.export(source, source.with_name("out"), target, **options))
    (note,) = [note for note in work.notes if note.startswith("Scheme ")]
    return note


@pytest.mark.parametrize(
    ("args", "target", "scheme", "said"),
    [
        (NVFP4, "vllm", "nvfp4a16", "the run was in NVFP4, and the checkpoint has no FP8 state"),
        (
            NVFP4,
            "tensorrt-llm",
            "dynamic",
            ". The run was in NVFP4: with what `precisionctl calibrate` records, as --fp8-state, --scheme nvfp4.",
        ),
        (BLOCK, "vllm", "block", "the run was in FP8 with 128-block scaling."),
        (BLOCK, "transformers", "block", "the run was in FP8 with 128-block scaling."),
        (MXFP8, "vllm", "mxfp8", "the run was in FP8 with MXFP8 scaling."),
        (CURRENT, "vllm", "dynamic", ". The run was in FP8 with current scaling, whose numbers no scheme has."),
        ({}, "vllm", "dynamic", "the checkpoint has no FP8 state"),
    ],
)
def test_the_scheme_is_that_in_which_the_run_computed(
    place: Path, tmp_path: Path, args: dict[str, Any], target: str, scheme: str, said: str
) -> None:
    note = chosen(of_run(place, tmp_path / "run", **args), target)
    assert note.startswith(f"Scheme {scheme}: ") and said in note
    assert ("The run was in" in note) is (scheme == "dynamic" and bool(args))


@pytest.mark.parametrize("args", [{"fp8": "hybrid", "fp8_recipe": "custom"}, {"fp8": "hybrid", "fp4": "e2m1"}], ids=str)
def test_arguments_of_which_no_recipe_can_be_made_are_told(place: Path, tmp_path: Path, args: dict[str, Any]) -> None:
    source = of_run(place, tmp_path / "run", **args)
    said = "What precision the run was in is not known: no recipe can be made of Megatron's arguments fp8 "
    for request in (Request.export(source, tmp_path / "out", "vllm"), Request(source, tmp_path / "out", "hf")):
        (note,) = [note for note in plan_command(request).notes if note.startswith(said)]
        assert all(word in note for word in args.values())


@pytest.mark.parametrize(
    ("recipe", "before"),
    [("nvfp4", "hf"), ("nvfp4", "a run in BF16"), pytest.param("fp8-block", "a run in BF16", marks=pytest.mark.soak)],
)
def test_a_recipe_that_waits_for_a_run_is_no_run(place: Path, tmp_path: Path, recipe: str, before: str) -> None:
    """`convert --recipe` says in the arguments what is to come, of weights that have trained in BF16 or not at all."""
    source = of_run(place, tmp_path / "run") if before == "a run in BF16" else place / before
    convert(source, tmp_path / "waits", "megatron", "fp8", recipe=PRESETS[recipe])
    convert(tmp_path / "waits", tmp_path / "again", "megatron", container="torch")
    for name in ("waits", "again"):
        assert chosen(tmp_path / name) == chosen(source)
        assert not any("run was in" in note for note in convert(tmp_path / name, tmp_path / f"{name}-hf", "hf").notes)
    ahead = precision_of_run(open_checkpoint(tmp_path / "again"))
    assert ahead is not None and ahead.precision == PRESETS[recipe], "in which `resume` goes on"


def test_the_arguments_of_a_release_are_of_no_run(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "megatron", tmp_path / "megatron")
    change_args(tmp_path / "megatron" / "release", **NVFP4)
    assert chosen(tmp_path / "megatron") == chosen(place / "megatron")


@pytest.mark.parametrize("target", ["vllm", "tensorrt-llm"])
def test_a_run_in_nvfp4_gets_fixed_input_scales_where_amaxes_are_recorded(
    place: Path, tmp_path: Path, target: str
) -> None:
    source = of_run(place, tmp_path / "run", **NVFP4)
    said = "Scheme nvfp4: the run was in NVFP4, and the FP8 state has an amax for every input, so input scales are "
    assert chosen(source, target, fp8_state=place / "state") == f"{said}fixed."


def test_amaxes_that_were_recorded_for_another_run_s_weights_make_static_and_its_own_scheme_is_named(
    place: Path, tmp_path: Path
) -> None:
    note = chosen(of_run(place, tmp_path / "run", **BLOCK), fp8_state=place / "state")
    assert note.startswith("Scheme static: the FP8 state has an amax for every input")
    assert note.endswith(". The run was in FP8 with 128-block scaling: --scheme block.")


def test_of_weights_that_the_engine_does_not_take_in_the_run_s_scheme_others_are_chosen(
    place: Path, tmp_path: Path
) -> None:
    """Of 384 rows, each of two GPUs has a block and a half."""
    note = chosen(of_run(place, tmp_path / "run", **BLOCK), ranks=2)
    assert note.startswith("Scheme dynamic")
    assert note.endswith(". The run was in FP8 with 128-block scaling, which vLLM does not take of this model.")


@pytest.mark.parametrize("target", ["vllm", "sglang", "tensorrt-llm", "transformers"])
@pytest.mark.parametrize("scheme", [None, pytest.param("block", marks=pytest.mark.soak)])
def test_blocks_of_a_run_have_its_scales_which_are_powers_of_two(
    place: Path, tmp_path: Path, target: str, scheme: Any
) -> None:
    """By Transformer Engine's rule (Float8BlockScaling, force_pow_2_scales): the greatest power of two under which the
    amax of a block stays within 448. `down_proj` is the same matrix in both layouts, so its codes are the run's."""
    source = of_run(place, tmp_path / "run", **BLOCK)
    carry_out(Request.export(source, tmp_path / "out", target, scheme), workers=1)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["scale_fmt"] == "ue8m0"
    name = "model.layers.1.mlp.down_proj.weight"
    weight, made = (
        load_file(place / "hf" / "model.safetensors")[name],
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    blocks = weight.double().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scales = 2.0 ** (blocks.abs().amax((1, 3), keepdim=True) / 448).log2().ceil()
    assert torch.equal(made[f"{name}_scale_inv"].double(), scales[:, 0, :, 0])
    codes = (blocks / scales).flatten(2).flatten(0, 1).float().to(torch.float8_e4m3fn)
    assert torch.equal(made[name].float(), codes.float())
    assert not [
        finding for finding in check(open_checkpoint(tmp_path / "out"), engine_named(target)) if finding.rule.fatal
    ]
    assert compare(open_checkpoint(source), open_checkpoint(tmp_path / "out")).equal


@pytest.mark.parametrize(
    ("args", "f32_scales", "expected"),
    [({}, False, "ue8m0"), ({}, True, None), (BLOCK, True, None), (NVFP4, False, "ue8m0")],
)
@pytest.mark.parametrize("to", ["export", "convert"])
def test_blocks_under_a_recipe_have_its_scales_whatever_the_run_had(
    place: Path, tmp_path: Path, args: dict[str, Any], f32_scales: bool, expected: str | None, to: str
) -> None:
    """A rollout computes on the grid of the training that the recipe is of."""
    source, out = of_run(place, tmp_path / "run", **args), tmp_path / "out"
    recipe = replace(PRESETS["fp8-block"], block=BlockScaling(use_f32_scales=f32_scales))
    if to == "export":
        request = Request.export(source, out, "vllm", "block", recipe=recipe)
    else:
        request = Request(source, out, "hf", "fp8", recipe=recipe)
    carry_out(request, workers=1)
    assert json.loads((out / "config.json").read_text())["quantization_config"].get("scale_fmt") == expected
    stored = load_file(out / "model.safetensors")
    scales = torch.cat([each.flatten() for name, each in stored.items() if name.endswith("_scale_inv")])
    assert bool((scales.log2().frac() == 0).all()) is (expected is not None)


@pytest.mark.parametrize(
    ("recipe", "args", "target", "scheme", "said"),
    [
        ("fp8-block", {}, "vllm", "block", "the recipe says FP8 with 128-block scaling."),
        ("mxfp8", BLOCK, "vllm", "mxfp8", "the recipe says FP8 with MXFP8 scaling."),
        ("nvfp4", {}, "vllm", "nvfp4a16", "the recipe says NVFP4, and the checkpoint has no FP8 state"),
        ("nvfp4", {}, "tensorrt-llm", "dynamic", ". The recipe says NVFP4: with what `precisionctl calibrate` records"),
        ("fp8-delayed", BLOCK, "vllm", "block", "the run was in FP8 with 128-block scaling."),
        ("fp8-current", {}, "vllm", "dynamic", "the checkpoint has no FP8 state"),
    ],
)
def test_a_recipe_says_the_scheme_instead_of_the_run(
    place: Path, tmp_path: Path, recipe: str, args: dict[str, Any], target: str, scheme: str, said: str
) -> None:
    """As `convert --precision fp8 --recipe` does. Delayed and current scaling are the numbers of no scheme."""
    note = chosen(of_run(place, tmp_path / "run", **args), target, recipe=replace(PRESETS[recipe], fp8=True))
    assert note.startswith(f"Scheme {scheme}: ") and said in note


def test_a_recipe_comes_before_state_and_codes_of_the_source_and_behind_a_file_of_state(
    place: Path, tmp_path: Path
) -> None:
    shutil.copytree(place / "hf", tmp_path / "hf")
    sidecar.write(tmp_path / "hf" / sidecar.RELATIVE, in_memory.recorded(HuggingFaceReader(place / "hf")))
    carry_out(Request.export(place / "hf", tmp_path / "dynamic", "vllm", "dynamic"), workers=1)
    for source, otherwise in (("hf", "static"), ("dynamic", "dynamic")):
        assert chosen(tmp_path / source).startswith(f"Scheme {otherwise}")
        assert chosen(tmp_path / source, recipe=PRESETS["fp8-block"]).startswith("Scheme block: the recipe says")
    note = chosen(place / "hf", recipe=PRESETS["fp8-block"], fp8_state=place / "state")
    assert note.startswith("Scheme static") and note.endswith("scaling: --scheme block.")


@pytest.mark.parametrize(("args", "expected"), [(BLOCK, "ue8m0"), ({}, None)])
def test_a_recipe_of_other_scaling_says_nothing_of_blocks(
    place: Path, tmp_path: Path, args: dict[str, Any], expected: str | None
) -> None:
    source = of_run(place, tmp_path / "run", **args)
    request = Request.export(source, tmp_path / "out", "vllm", "block", recipe=PRESETS["fp8-delayed"])
    assert plan_command(request).plan.quantization.get("scale_fmt") == expected


def test_modules_that_the_run_kept_in_bf16_stay_there_unless_others_are_asked_for(place: Path, tmp_path: Path) -> None:
    source = of_run(place, tmp_path / "run", **NVFP4, **LAST)
    last = {f"model.layers.1.{name}.weight" for name in (*ATTENTION, *MLP)}

    def told(stay: set[str], **options: Any) -> list[str]:
        """The note, after a look at which linears of both layers stay values."""
        command = plan_command(Request.export(source, tmp_path / "out", "vllm", **options))
        linears = {name.replace(".1.", f".{layer}.") for name in last for layer in (0, 1)}
        assert linears - set(command.plan.codes) == stay
        listed = {f"{name}.weight" for name in command.plan.quantization["ignore"]}
        assert linears & listed == stay
        return [note for note in command.notes if "stay in BF16" in note or "stays in BF16" in note]

    said = "linears stay in BF16, e.g. `model.layers.1.{}`: the run kept them there, or what is computed with them. "
    said += "To encode them: --include PATTERN, or a --recipe."
    assert told(last) == [f"7 {said}".format(ATTENTION[0])]
    assert told(last, scheme="dynamic") == told(last)
    mlp = {f"model.layers.1.{name}.weight" for name in MLP}
    assert told(mlp, include=("*.self_attn.*",)) == [f"3 {said}".format(MLP[0])]
    gate_up = {f"model.layers.1.mlp.{name}.weight" for name in ("gate_proj", "up_proj")}
    assert told(last - gate_up, include=("*.up_proj",)) == [f"5 {said}".format(ATTENTION[0])], "gate with up"
    assert told(last, include=("*.up_proj",), exclude=("*.layers.1.*",)) == [], "which says so itself"
    assert told(set(), recipe=PRESETS["nvfp4"]) == []
    assert told(last, recipe=replace(PRESETS["nvfp4"], num_layers_at_end_in_bf16=1)) == []


def test_where_a_run_kept_every_layer_in_bf16_an_export_does_not_and_says_so(place: Path, tmp_path: Path) -> None:
    """Megatron takes such numbers. What a run of ours keeps by name stays all the same."""
    source = of_run(place, tmp_path / "run", **BLOCK, first_last_layers_bf16=True)
    command = plan_command(Request.export(source, tmp_path / "out", "vllm", "dynamic"))
    assert len(command.plan.codes) == 2 * 7
    said = "What the run says of its first and last layers is not heeded: the first 1 and the last 1 layers in BF16 "
    assert f"{said}leave none of 2 for FP8." in command.notes
    by_name = replace(PRESETS["fp8-block"], keep_bf16=("*.linear_proj",), num_layers_at_end_in_bf16=2)
    precision, notes = precision_of_export(None, by_name, command.plan.model)
    assert precision.keep_bf16 == ("*.linear_proj",) and len(notes) == 1


@pytest.mark.parametrize("who", ["recipe", "run"])
def test_where_all_is_kept_in_bf16_the_error_says_by_whom(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    all_kept = replace(PRESETS["fp8-block"], keep_bf16=("*",))
    if who == "run":
        monkeypatch.setattr(Source, "trained_in", all_kept)
    request = Request.export(place / "hf", tmp_path / "out", "vllm", "dynamic")
    with pytest.raises(PrecisionError, match=f"the {who} keeps all in BF16 .*--include PATTERN"):
        plan_command(replace(request, recipe=all_kept if who == "recipe" else None))


@pytest.mark.parametrize("how", ["a scheme", "te", "convert"])
@pytest.mark.parametrize("damage", ["other words", "{", "[]", "[" * 100_000], ids=lambda damage: damage[:11])
def test_an_export_says_that_it_does_not_know_what_the_run_kept_in_bf16(
    place: Path, tmp_path: Path, how: str, damage: str
) -> None:
    source = of_run(place, tmp_path / "run", **({"fp8": "hybrid", "fp8_recipe": "custom"} | LAST))
    if damage != "other words":
        file = source / "iter_0000003" / RUN_FILE
        file.parent.mkdir(exist_ok=True)
        file.write_text(damage)
    request = {
        "a scheme": Request.export(source, tmp_path / "out", "vllm", "dynamic"),
        "te": Request.export(source, tmp_path / "out", "te", fp8_state=place / "state"),
        "convert": Request(source, tmp_path / "out", "hf", "fp8", fp8_state=place / "state"),
    }[how]
    notes = [note for note in plan_command(request).notes if note.endswith(". What it kept in BF16 may become codes.")]
    assert len(notes) == 1 and notes[0].startswith("What precision the run was in is not known: ")


@pytest.mark.parametrize("pattern", ["model.layers.0.*", "*.q_proj", "*.layers.99.*", ""])
@pytest.mark.parametrize("target", ["vllm", "te"])
def test_a_recipe_that_keeps_no_module_in_bf16_is_noted(place: Path, tmp_path: Path, pattern: str, target: str) -> None:
    said = f"keep_bf16 {pattern!r} names no module. Whole names are matched, and here these are such as "
    said += "`decoder.layers.0.self_attention.linear_qkv`."
    recipe = replace(PRESETS["fp8-delayed"], keep_bf16=("*.linear_fc2", pattern))
    options = {"recipe": recipe, "fp8_state": place / "state"}
    notes = plan_command(Request.export(place / "hf", tmp_path / "out", target, **options)).notes
    assert [note for note in notes if note.startswith("keep_bf16")] == [said]


@pytest.mark.parametrize("target", ["vllm", "te"])
def test_a_run_in_delayed_scaling_gets_fixed_input_scales_where_it_computed_in_fp8(
    place: Path, tmp_path: Path, target: str
) -> None:
    """No amax is recorded of the inputs of a layer in BF16."""
    source, every = of_run(place, tmp_path / "run", **DELAYED, **LAST), sidecar.read(place / "state")
    recorded = {name: state for name, state in every.modules.items() if ".layers.1." not in name}
    sidecar.write(tmp_path / "state", replace(every, modules=recorded))
    request = Request.export(source, tmp_path / "out", target, fp8_state=tmp_path / "state")
    command = plan_command(request)
    assert sum("7 linears stay in BF16, e.g. `model.layers.1." in note for note in command.notes) == 1
    if target == "vllm":
        assert any(note.startswith("Scheme static: the FP8 state has an amax for every") for note in command.notes)
    with pytest.raises(MissingFp8State):
        plan_command(replace(request, recipe=PRESETS["fp8-delayed"], scheme="static"))
