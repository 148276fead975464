"""Exports: which scale each tensor gets, from where, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from cache_states import SHORT, states_for
from safetensors.torch import load_file

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.errors import MissingFp8State, PrecisionError, RecipeError
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import DelayedScaling, Fp8State, RoleState
from precisionctl.param import Parallelism
from precisionctl.precision import PRESETS

FUSED = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
SINGLE = ("self_attn.o_proj", "mlp.down_proj")


def source(tmp_path: Path, recipe: DelayedScaling = SHORT) -> Path:
    path = tmp_path / "hf"
    pico.save(path, "llama-3", dtype=torch.bfloat16)
    sidecar.write(path / sidecar.RELATIVE, states_for(path, recipe))
    return path


def export(path: Path, target: str = "vllm", scheme: str = "static") -> dict[str, torch.Tensor]:
    out = path.with_name(f"{target}-{scheme}")
    execute(plan_command(Request.export(path, out, target, scheme)))  # type: ignore[arg-type]
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("target", ["vllm", "tensorrt-llm"])
def test_a_fused_group_shares_one_weight_scale_and_one_input_scale(tmp_path: Path, target: str) -> None:
    stored = export(source(tmp_path), target)
    reader = HuggingFaceReader(tmp_path / "hf")
    number = 0
    for group in (FUSED[0], SINGLE[:1], FUSED[1], SINGLE[1:]):  # the order of the modules in states_for
        for layer in range(2):
            number += 1
            names = [f"model.layers.{layer}.{part}" for part in group]
            amax = max(read_tensor(reader, f"{name}.weight").abs().max().float() for name in names)
            for name in names:
                assert stored[f"{name}.weight_scale"].item() == (amax / 448).item()
                assert stored[f"{name}.input_scale"].item() == pytest.approx(number / 448, rel=1e-7)
                assert stored[f"{name}.weight_scale"].dtype == torch.float32


def test_codes_are_the_nearest_to_a_division_by_the_stored_scale(tmp_path: Path) -> None:
    """An independent rounding: the nearest of all finite codes to the FP32 quotient, ties to even codes."""
    stored = export(source(tmp_path))
    reader = HuggingFaceReader(tmp_path / "hf")
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        quotient = read_tensor(reader, f"{name}.weight").float() / stored[f"{name}.weight_scale"]
        codes = stored[f"{name}.weight"].view(torch.uint8)
        distance = (grid.nan_to_num(1e9)[:, None] - quotient.flatten()).abs()
        chosen = distance.gather(0, codes.flatten().long()[None])[0]
        assert torch.equal(chosen, distance.amin(0))
        tied = (distance == distance.amin(0)).sum(0) > 1
        assert (codes.flatten()[tied & (quotient.flatten() != 0)] % 2 == 0).all()


def test_a_history_of_length_1_gives_its_amax_from_the_scale(tmp_path: Path) -> None:
    recipe = DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent", margin=2)
    stored = export(source(tmp_path, recipe))
    assert stored["model.layers.0.self_attn.q_proj.input_scale"].item() == pytest.approx(1 / 448, rel=1e-6)


@pytest.mark.parametrize("target", ["vllm", "tensorrt-llm"])
def test_dynamic_needs_no_state_and_scales_each_channel(tmp_path: Path, target: str) -> None:
    pico.save(tmp_path / "hf", "llama-3", dtype=torch.bfloat16)
    stored = export(tmp_path / "hf", target, "dynamic")
    weight = read_tensor(HuggingFaceReader(tmp_path / "hf"), "model.layers.0.mlp.up_proj.weight")
    scales = stored["model.layers.0.mlp.up_proj.weight_scale"]
    assert torch.equal(scales.flatten(), weight.abs().amax(1).float() / 448)
    assert not any("input_scale" in name for name in stored)


def test_static_without_state_says_what_to_run_first(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-3", dtype=torch.bfloat16)
    with pytest.raises(MissingFp8State, match="no FP8 state.*precisionctl resume --precision fp8"):
        export(tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_static_names_the_layer_whose_input_was_never_recorded(tmp_path: Path) -> None:
    path = source(tmp_path)
    states = sidecar.read(path / sidecar.RELATIVE)
    module = "decoder.layers.1.mlp.linear_fc1"
    roles = {**states.modules[module].roles, "input": RoleState.fresh(8)}
    sidecar.write(path / sidecar.RELATIVE, replace(states, modules={**states.modules, module: Fp8State(roles)}))
    with pytest.raises(MissingFp8State, match=module):
        export(path)


@pytest.mark.parametrize("iteration, told", [(123, "(test, iteration 123)"), (None, "(test)")])
def test_who_recorded_the_scales_and_when_is_told(tmp_path: Path, iteration: int | None, told: str) -> None:
    path = source(tmp_path)
    sidecar.write(path / sidecar.RELATIVE, replace(sidecar.read(path / sidecar.RELATIVE), iteration=iteration))
    work = plan_command(Request.export(path, tmp_path / "out", "vllm"))
    assert f"Input scales are those of the checkpoint's FP8 state {told}." in work.notes


def test_a_shape_that_fp8_gemms_do_not_take_is_refused_at_plan_time(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16, intermediate_size=100)
    with pytest.raises(PrecisionError, match="multiples of 16"):
        export(tmp_path / "hf", scheme="dynamic")


def test_state_that_no_scale_would_be_made_of_is_refused(tmp_path: Path) -> None:
    path = source(tmp_path)
    for scheme in ("dynamic", "nvfp4a16"):
        with pytest.raises(RecipeError, match=f"scheme {scheme} stores no input scales"):
            request = Request.export(path, tmp_path / "out", "vllm", scheme, fp8_state=path / sidecar.RELATIVE)  # type: ignore[arg-type]
            plan_command(request)
    with pytest.raises(PrecisionError, match="TensorRT-LLM does not read nvfp4a16.*Choose --scheme static or dynamic"):
        plan_command(Request.export(path, tmp_path / "out", "tensorrt-llm", "nvfp4a16"))


def test_a_model_that_only_fixed_inputs_serve_asks_for_them(tmp_path: Path) -> None:
    """GPT-2's weights are stored as [in, out], so no engine's channel or block is one of theirs."""
    pico.save(tmp_path / "hf", "gpt2", dtype=torch.bfloat16)
    with pytest.raises(PrecisionError, match="vLLM needs fixed input scales for this model: .*--fp8-state"):
        plan_command(Request.export(tmp_path / "hf", tmp_path / "out", "vllm"))


def test_an_unknown_engine_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="Known: sglang, tensorrt-llm, transformers, vllm"):
        export(source(tmp_path), target="mlc")


def test_a_megatron_source_exports_the_bytes_that_its_hugging_face_source_does(tmp_path: Path) -> None:
    path = source(tmp_path)
    execute(plan_command(Request(path, tmp_path / "megatron", "megatron", parallelism=Parallelism(2))))
    first = export(path)
    execute(plan_command(Request.export(tmp_path / "megatron", tmp_path / "second", "vllm")))
    second = load_file(tmp_path / "second" / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first)


def test_convert_to_fp8_hugging_face_is_this_export(tmp_path: Path) -> None:
    path = source(tmp_path)
    expected = export(path)
    execute(plan_command(Request(path, tmp_path / "converted", "hf", precision="fp8")))
    stored = load_file(tmp_path / "converted" / "model.safetensors")
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_state_of_what_is_excluded_is_still_this_models(tmp_path: Path, scheme: Any) -> None:
    """Whether in the source or in a file: it is of all that a recipe computes in FP8, whatever becomes codes."""
    path = source(tmp_path)
    expected = export(path, scheme=scheme)
    file = tmp_path / "state.fp8"
    shutil.copy(path / sidecar.RELATIVE, file)
    for name, given in {"own": None, "given": file if scheme == "static" else None}.items():
        request = Request.export(path, tmp_path / name, "vllm", scheme, exclude=("*.down_proj",), fp8_state=given)
        execute(plan_command(request))
        stored = load_file(tmp_path / name / "model.safetensors")
        for weight in (f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(2)):
            assert stored[weight].dtype == torch.bfloat16
        codes = [weight for weight, values in stored.items() if values.dtype == torch.float8_e4m3fn]
        assert len(codes) == 12
        assert all(
            torch.equal(stored[weight].view(torch.uint8), expected[weight].view(torch.uint8)) for weight in codes
        )


def test_convert_to_fp8_hugging_face_takes_the_family_and_files_it_is_told(tmp_path: Path) -> None:
    path = source(tmp_path)
    expected = export(path)
    execute(plan_command(Request(path, tmp_path / "megatron", "megatron")))
    for files in (tmp_path / "megatron").rglob("precisionctl/hf"):
        shutil.rmtree(files)
    told = Request(tmp_path / "megatron", tmp_path / "told", "hf", precision="fp8", reference=path)
    execute(plan_command(told))
    stored = load_file(tmp_path / "told" / "model.safetensors")
    assert all(torch.equal(stored[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)
    family = replace(told, destination=tmp_path / "mistral", reference=None, architecture="mistral")
    assert plan_command(family).plan.model.architecture == "mistral"


def test_an_export_of_an_export_has_its_codes(tmp_path: Path) -> None:
    path = source(tmp_path)
    first = export(path)
    work = plan_command(Request.export(path.with_name("vllm-static"), tmp_path / "again", "tensorrt-llm"))
    assert work.notes[0] == "Scheme static: the weights are FP8 codes of that kind already."
    execute(work)
    again = load_file(tmp_path / "again" / "model.safetensors")
    for name, values in first.items():
        if "input_scale" in name:
            assert again[name].item() == pytest.approx(values.item(), rel=1e-7)
        else:
            assert torch.equal(again[name].flatten().view(torch.uint8), values.flatten().view(torch.uint8)), name


@pytest.mark.parametrize(
    ("kept", "other", "keys"),
    [
        (0, 1, {"keep_bf16": ("decoder.layers.0.*",)}),
        (0, 1, {"num_layers_at_start_in_bf16": 1}),
        (1, 0, {"num_layers_at_end_in_bf16": 1}),
    ],
)
def test_what_a_recipe_keeps_in_bf16_is_left_so_and_ignored_by_name(
    tmp_path: Path, kept: int, other: int, keys: dict[str, Any]
) -> None:
    path = source(tmp_path)
    recipe = replace(PRESETS["fp8-delayed"], **keys)
    execute(plan_command(Request.export(path, tmp_path / "out", "vllm", recipe=recipe)))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored[f"model.layers.{kept}.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert stored[f"model.layers.{other}.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert f"model.layers.{kept}.mlp.up_proj" in config["quantization_config"]["ignore"]


DENSE = ("qwen2", "qwen3", "phi3", "nemotron", "gemma3", "gpt-neox")


@pytest.mark.parametrize("family", DENSE)
def test_other_families_are_encoded_to_the_nearest_codes(tmp_path: Path, family: str) -> None:
    """An independent spelling, torch's own division and cast: each row by its largest magnitude over 448."""
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16)
    stored, plain = export(tmp_path / "hf", scheme="dynamic"), load_file(tmp_path / "hf" / "model.safetensors")
    encoded = [name for name, values in stored.items() if values.dtype == torch.float8_e4m3fn]
    assert len(encoded) >= 8
    for name in encoded:
        scale = plain[name].float().abs().amax(1, keepdim=True) / 448
        assert torch.equal(stored[name].float(), (plain[name].float() / scale).to(torch.float8_e4m3fn).float())


def test_scales_for_channels_of_a_transposed_weight_are_refused(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "gpt2", dtype=torch.bfloat16)
    with pytest.raises(PrecisionError, match=r"c_attn.weight` is stored as \[in, out\].*--scheme static"):
        export(tmp_path / "hf", scheme="dynamic")
