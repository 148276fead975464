"""NaN among weights: told by name wherever values are looked at anyway; copied like other bytes where they are not."""

import json
from pathlib import Path
from typing import Any

import fp8_directories
import mxfp4_directories
import pico
import pytest
import torch
from command_line import say
from conversions import run
from safetensors.torch import load_file, save_file
from soaking import in_soak

from precisionctl.codes import numerics
from precisionctl.errors import BROKEN_WEIGHTS, DamagedCheckpoint, PrecisionError

DOWN, GATE = "model.layers.1.mlp.down_proj.weight", "model.layers.0.mlp.gate_proj.weight"


def make_source(folder: Path, value: float, **settings: Any) -> Path:
    """A checkpoint with this value in two weights."""
    pico.save(folder, hidden_size=128, intermediate_size=256, num_key_value_heads=4, **settings)
    stored = load_file(folder / "model.safetensors")
    stored[DOWN][127, 3] = stored[GATE][0, 127] = value
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


COMMANDS = {
    "cast": ("float32", "convert", "--to=megatron --precision=bf16 --workers=2"),
    "amax": ("bfloat16", "convert", "--to=megatron --precision=fp8 --workers=2"),
    "rows": ("bfloat16", "export-inference", "--target=vllm --scheme=dynamic --workers=1"),
    "blocks": ("bfloat16", "export-inference", "--target=vllm --scheme=block --workers=2"),
    "tensors": ("bfloat16", "convert", "--to=hf --precision=fp8 --recipe=fp8-current --workers=2"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_nan_weight_is_told_by_name(tmp_path: Path, name: str) -> None:
    dtype, command, options = COMMANDS[name]
    source = make_source(tmp_path / "source", torch.nan, dtype=getattr(torch, dtype))
    said = say(command, source, tmp_path / "out", *options.split())
    down, gate = {
        "megatron": ("decoder.layers.1.mlp.linear_fc2.weight", "decoder.layers.0.mlp.linear_fc1.weight"),
        "hf": (DOWN, GATE),
    }["megatron" if "megatron" in options else "hf"]
    assert f"the source has NaN in 2 of its tensors, and so has the result ({', '.join(sorted((down, gate)))})" in said
    assert f"what is computed with them is NaN. {BROKEN_WEIGHTS}" in said


@pytest.mark.parametrize("value", [torch.nan, *in_soak(-torch.inf)])
def test_readiness_names_the_broken_tensors_and_advises_no_precision(tmp_path: Path, value: float) -> None:
    """`GATE` is fused with another in Megatron, which is sound."""
    source = make_source(tmp_path / "source", value, dtype=torch.bfloat16)
    said = say("inspect", source, "--fp8", "--workers", 1, "--html", tmp_path / "page.html")
    assert (
        f"WARNING: {GATE}, {DOWN} have NaN or infinity. {BROKEN_WEIGHTS}" in said
        and BROKEN_WEIGHTS in (tmp_path / "page.html").read_text()
    )
    assert said.count("not ready: NaN or infinity in 2 modules, which no precision mends") == 4
    assert "keep_bf16" not in said and "keep in BF16" not in said and "repair decoder.layers" in said


def test_codes_whose_scale_makes_infinities_of_them_are_broken_too(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path, "modelopt-tensor")
    stored = load_file(tmp_path / "model.safetensors")
    stored[f"{DOWN}_scale"].fill_(3e38)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert f"WARNING: {DOWN} has NaN or infinity." in say("inspect", tmp_path, "--fp8", "--workers", 1)


def test_what_is_decoded_is_looked_at_and_what_is_copied_is_not(tmp_path: Path) -> None:
    """The codes of a NaN are copied as codes, and found again when they are decoded."""
    source = make_source(tmp_path / "source", torch.nan, dtype=torch.bfloat16)
    assert "NaN" not in say("convert", source, tmp_path / "copy", "--to=megatron")
    say("export-inference", source, tmp_path / "fp8", "--target=vllm", "--scheme=dynamic")
    codes = load_file(tmp_path / "fp8" / "model.safetensors")[DOWN]
    assert codes.float().isnan().nonzero().tolist() == [[127, 3]]
    for precision in ("bf16", "fp32"):
        said = say("convert", tmp_path / "fp8", tmp_path / precision, "--to=hf", f"--precision={precision}")
        assert f"NaN in 2 of its tensors, and so has the result ({GATE}, {DOWN})" in said
        assert load_file(tmp_path / precision / "model.safetensors")[DOWN].isnan().nonzero().tolist() == [[127, 3]]


@pytest.mark.parametrize("to", ["hf", *in_soak("megatron", "dcp")])
def test_both_codes_of_a_nan_come_back_by_way_of_bf16(tmp_path: Path, to: str) -> None:
    source = make_codes(tmp_path / "fp8", 0.5, 1.5)
    stored = load_file(source / "model.safetensors")
    stored[DOWN].view(torch.uint8)[:, ::5] = 0x7F
    stored[DOWN].view(torch.uint8)[:, ::7] = 0xFF
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    say("convert", source, tmp_path / "bf16", f"--to={to}", "--precision=bf16")
    say("convert", tmp_path / "bf16", tmp_path / "back", "--to=hf", "--precision=fp8")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert torch.equal(back[DOWN].view(torch.uint8), stored[DOWN].view(torch.uint8))


def make_codes(folder: Path, scale: float, code: float) -> Path:
    """FP8 codes of one number, with one scale."""
    fp8_directories.make(folder, "modelopt-tensor")
    stored = load_file(folder / "model.safetensors")
    stored[f"{DOWN}_scale"].fill_(scale)
    stored[DOWN] = torch.full(stored[DOWN].shape, code).to(torch.float8_e4m3fn)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp8"])
def test_codes_that_their_scale_makes_infinite_are_refused(tmp_path: Path, precision: str) -> None:
    """2 * 2^127, which is the first number beyond FP32; and 6 * 2^127 of MXFP4."""
    make_codes(tmp_path / "fp8", 2.0**127, 2)
    mxfp4_directories.make(tmp_path / "mxfp4", (254, 255))
    for kind in ("fp8", "mxfp4"):
        with pytest.raises(DamagedCheckpoint, match="` has values that are infinite, by its codes and their scales"):
            run(tmp_path / kind, tmp_path / f"{kind} out", "hf", precision)
        assert not (tmp_path / f"{kind} out").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_number_that_rounding_would_make_infinite_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """3.4e38 is one of FP32, and nearer to 2^128 than to BF16's largest."""
    source = tmp_path / "source"
    if dtype == torch.float32:
        make_source(source, -3.4e38, dtype=torch.float32)
    else:
        make_codes(source, 3.4e38, -1)
    with pytest.raises(PrecisionError, match="`.*_proj.weight` holds a number that is too large for bfloat16"):
        run(source, tmp_path / "bf16", "hf", "bf16")
    run(source, tmp_path / "fp32", "hf", "fp32")
    least = torch.tensor(-3.4e38)
    assert not (tmp_path / "bf16").exists() and load_file(tmp_path / "fp32" / "model.safetensors")[DOWN].min() == least


def test_the_largest_number_stands_for_infinity_as_in_masks(tmp_path: Path) -> None:
    make_source(tmp_path / "source", torch.finfo(torch.float32).min, dtype=torch.float32)
    run(tmp_path / "source", tmp_path / "out", "hf", "bf16")
    assert load_file(tmp_path / "out" / "model.safetensors")[DOWN].min() == -torch.inf


def test_infinities_of_both_signs_are_no_nan(tmp_path: Path) -> None:
    """Their sum is one."""
    values = torch.tensor([[torch.inf, -torch.inf, 1.0]])
    assert not numerics.has_nan(values) and numerics.has_nan(
        torch.cat([values, values.new_tensor([[0, 0, torch.nan]])])
    )
    source = make_source(tmp_path / "source", torch.inf)
    assert "NaN" not in say("convert", source, tmp_path / "out", "--to=megatron", "--precision=bf16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_nan_anywhere_is_seen_and_amax_passes_it_over(dtype: torch.dtype) -> None:
    plain = torch.linspace(-3, 2, 7 * 33).view(7, 33).to(dtype)
    scratch = torch.empty(64)
    assert numerics.amax_and_nan(plain) == (3, False) and not numerics.row_amax_and_nan(plain, scratch)[1]
    for row, column in ((0, 0), (3, 32), (6, 1)):
        for sign in (1, -1):
            values = plain.clone()
            values[row, column] = sign * torch.nan
            without = values.nan_to_num(nan=0.0).abs()
            amax, seen = numerics.row_amax_and_nan(values, scratch)
            assert seen and torch.equal(amax, without.amax(1, keepdim=True).float()) and numerics.has_nan(values)
            assert numerics.amax_and_nan(values) == (without.amax(), True)


def test_inspect_finds_what_a_copy_did_not_look_at(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", torch.nan, dtype=torch.bfloat16)
    found = json.loads(say("inspect", source, "--fp8", "--json"))["readiness"]
    named = ["decoder.layers.0.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc2"]
    assert all(
        (verdict["modules_to_repair"], verdict["keep_bf16"]) == (2, []) for verdict in found["verdicts"].values()
    )
    findings = {name: roles["weight"]["findings"] for name, roles in found["modules"].items()}
    assert [name for name, each in findings.items() if [one["kind"] for one in each] == ["not finite"]] == named
