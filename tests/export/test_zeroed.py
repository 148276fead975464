"""Weights that an outlier beside them sends to zero: told by name, with the share, wherever codes are made."""

import math
import re
from pathlib import Path

import in_memory
import pico
import pytest
import torch
from command_line import say
from safetensors.torch import load_file, save_file
from soaking import in_soak

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.codes import nibbles, numerics
from precisionctl.codes.elements import E2M1, E4M3, E5M2, INT4, Element
from precisionctl.codes.statistics import UNDERFLOW
from precisionctl.dtypes import DType
from precisionctl.fp8 import sidecar

DOWN, GATE = "model.layers.1.mlp.down_proj.weight", "model.layers.0.mlp.gate_proj.weight"


def make_source(folder: Path, outlier: float) -> Path:
    """A checkpoint whose weights are Gaussian, with one large one in down_proj and none in others."""
    pico.save(folder, hidden_size=128, intermediate_size=256, num_key_value_heads=4, dtype=torch.bfloat16)
    stored = load_file(folder / "model.safetensors")
    stored[DOWN][127, 3] = outlier
    stored[GATE][:, :64] = 0  # as zero before as after
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("scheme", "share", "workers"), [("static", 0.9, 1), ("static", 0.9, 2), ("block", 0.4, 2)])
def test_the_tensor_and_the_share_are_named(tmp_path: Path, scheme: str, share: float, workers: int) -> None:
    """Of the two blocks of 128 x 128 one is lost."""
    source = make_source(tmp_path / "source", 3e4)
    sidecar.write(source / sidecar.RELATIVE, in_memory.recorded(HuggingFaceReader(source)))
    how = ("--target=vllm", f"--scheme={scheme}", f"--workers={workers}")
    said = say("export-inference", source, tmp_path / "out", *how)
    values, codes = (load_file(tmp_path / of / "model.safetensors")[DOWN] for of in ("source", "out"))
    lost = int(((codes.float() == 0) & (values != 0)).sum()) / values.numel()
    assert lost > share
    told = re.search(rf"WARNING: many elements became 0 in 1 of the tensors \({re.escape(DOWN)} ([\d.]+)%\)", said)
    assert told and abs(float(told[1]) / 100 - lost) < 0.005  # of one row in 16


def test_codes_that_are_made_again_after_an_edit_are_looked_at_too(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", 0.1)
    say("export-inference", source, tmp_path / "fp8", "--target=vllm", "--scheme=block")
    say("convert", tmp_path / "fp8", tmp_path / "bf16", "--to=hf", "--precision=bf16")
    assert "became 0" not in say("convert", tmp_path / "bf16", tmp_path / "same", "--to=hf", "--precision=fp8")
    stored = load_file(tmp_path / "bf16" / "model.safetensors")
    stored[DOWN][127, 3] = 3e4
    save_file(stored, tmp_path / "bf16" / "model.safetensors", metadata={"format": "pt"})
    said = say("convert", tmp_path / "bf16", tmp_path / "edited", "--to=hf", "--precision=fp8")
    assert f"many elements became 0 in 1 of the tensors ({DOWN} 50.0%)" in said


def test_a_scale_for_each_row_loses_a_row_and_says_nothing(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", 3e4)
    said = say("export-inference", source, tmp_path / "out", "--target=vllm", "--scheme=dynamic")
    codes = load_file(tmp_path / "out" / "model.safetensors")[DOWN].float()
    assert (codes[127] == 0).sum() > 0.9 * codes.shape[1] and "became 0" not in said


@pytest.mark.parametrize("scheme", ["w4a16", *in_soak("mxfp4", "nvfp4a16")])
def test_four_bits_name_tensors_whose_groups_have_outliers(tmp_path: Path, scheme: str) -> None:
    """One in 16 inputs is an outlier, so each group has one. What is beside it, 15 in 16, is less than a hundredth of a
    step, and becomes 0. A single one spoils a group alone."""
    source = make_source(tmp_path / "source", 3e4)
    how = ("--target=vllm", f"--scheme={scheme}")
    assert "became 0" not in say("export-inference", source, tmp_path / "one", *how)
    stored = load_file(source / "model.safetensors")
    stored[DOWN][:, ::16] = 3e2
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    said = say("export-inference", source, tmp_path / "all", *how)
    assert f"many elements became 0 in 1 of the tensors ({DOWN} 93.8%)" in said
    (excluded,) = re.findall(r"Leave such modules out \(--exclude '(.+?)'\)", said)
    assert "became 0" not in say("export-inference", source, tmp_path / "without", *how, "--exclude", excluded)
    compared = say("verify", source, tmp_path / "all")  # all codes are those of their values
    assert "93.8% of values became zero" in compared and compared.count("became zero") == 1


@pytest.mark.parametrize("element", [E2M1, INT4], ids=str)
@pytest.mark.parametrize("columns", [32, 31])
def test_underflows_of_four_bits_are_counted_as_the_slow_reference_counts_them(element: Element, columns: int) -> None:
    values = torch.linspace(-3, 3, 40 * columns).view(40, columns)
    values[::3, ::4], values[1::3, ::4] = 0.0, -0.0
    scales, packed = torch.ones(40, 1), torch.empty(40, 16, dtype=torch.uint8)
    nibbles.encode(values, element, scales, packed, torch.empty(nibbles.SCRATCH))
    # halfway to the next number, which is 0.5 in E2M1 and 1 in INT4, a value goes to the even one, 0
    expected = int(((values != 0) & (values.abs() <= (0.25 if element == E2M1 else 0.5))).sum())
    assert expected and nibbles.underflows(values, element, packed) == expected


def test_a_hundred_times_the_spread_is_what_fp8_is_for(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", 2.0)
    said = say("convert", source, tmp_path / "out", "--to=hf", "--precision=fp8", "--recipe=fp8-current")
    assert "became 0" not in said


@pytest.mark.parametrize("codes", [E4M3.dtype, E5M2.dtype], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_underflows_are_counted_as_the_slow_reference_counts_them(dtype: torch.dtype, codes: DType) -> None:
    """Zeros of both signs, NaN, infinities and values on either side of half the smallest code."""
    smallest = 2.0**-9 if codes == DType.float8_e4m3fn else 2.0**-16
    edges = [0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, -1.0]
    edges += [sign * smallest * part for sign in (1, -1) for part in (0.4, 0.5, 0.6, 1.0)]
    values = torch.tensor(edges).to(dtype).repeat(33).view(5, -1)
    made = numerics.encode(values, torch.ones(()), codes.torch)
    expected = sum(float(v) != 0 and float(c) == 0 for v, c in zip(values.flatten(), made.flatten(), strict=True))
    assert expected and numerics.underflows(values, made) == expected
    assert numerics.underflows(values.t().contiguous().t(), made) == expected


def test_the_limit_is_where_a_gaussian_loses_that_share() -> None:
    """Half of E4M3's smallest code is 2^-10, its largest 448: P(|x| < 5,700 sigma / 448 / 2^10) of a normal x."""
    assert math.erf(5700 / 448 / 2**10 / math.sqrt(2)) == pytest.approx(UNDERFLOW, rel=0.02)
