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
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.commands.run_precision import precision_of_run
from precisionctl.engines.base import engine_named
from precisionctl.fp8 import sidecar
from precisionctl.precision import PRESETS
from precisionctl.verify.compare import compare
from precisionctl.verify.engine_rules import check

WHOLE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
"""A Llama of which every linear is whole blocks."""
NVFP4 = {"fp4": "e2m1", "fp4_recipe": "nvfp4"}
BLOCK = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
MXFP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
CURRENT = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}


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


def test_modules_that_the_run_kept_in_bf16_and_that_become_codes_are_told(place: Path, tmp_path: Path) -> None:
    ends = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 1}
    source = of_run(place, tmp_path / "run", **NVFP4, **ends)

    def told(**options: Any) -> list[str]:
        notes = plan_command(Request.export(source, tmp_path / "out", "vllm", **options)).notes
        return [note for note in notes if "that the run kept in BF16" in note]

    (note,) = told()
    assert note.startswith(
        "4 modules that the run kept in BF16, e.g. `decoder.layers.1.mlp.linear_fc1`, become codes: "
    )
    assert told(exclude=("model.layers.1.*",)) == []
    assert told(recipe=replace(PRESETS["nvfp4"], num_layers_at_end_in_bf16=1)) == []
    change_args(source / "iter_0000003", num_layers_at_end_in_bf16=99)  # of another model
    assert told() == []
