"""`verify --fp8`: what has become of FP8 codes."""

import json
import math
from pathlib import Path

import fp8_directories
import pytest
import torch
from click.testing import CliRunner
from conversions import run
from safetensors.torch import load_file, save_file
from soaking import in_soak

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.cli import main
from precisionctl.verify import hf_tensors
from precisionctl.verify.code_comparison import CodesComparison, compare_with_bf16
from precisionctl.verify.compare import compare

UP = "model.layers.0.mlp.up_proj.weight"
SPELLINGS = pytest.mark.parametrize(
    "spelling", ["fp8-block", "modelopt-mxfp8", *in_soak("compressed-tensor", "modelopt-channel")]
)


def compared(a: Path, b: Path | None) -> dict[str, CodesComparison]:
    left = open_checkpoint(a)
    found = compare_with_bf16(left) if b is None else compare(left, open_checkpoint(b), fp8=True).codes
    return {weight.name: weight for weight in found}


@SPELLINGS
def test_nothing_has_become_of_codes_in_bf16(tmp_path: Path, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_tensors, "PIECE", 37 * 192)  # within blocks, and across their ends
    made = fp8_directories.make(tmp_path / "fp8", spelling, **fp8_directories.RAGGED)
    run(tmp_path / "fp8", tmp_path / "megatron", "megatron")
    for found in (
        compared(tmp_path / "fp8", tmp_path / "megatron"),
        compared(tmp_path / "megatron", tmp_path / "fp8"),
        compared(tmp_path / "fp8", None),
    ):
        assert set(found) == set(made)
        for name, weight in found.items():
            assert weight.codes == made[name].codes.numel()
            assert (weight.changed, weight.scale_ratio, weight.idempotent) == (0, (1.0, 1.0), True)
            values = made[name].values.double()
            noise = float((values - values.bfloat16().double()).square().sum())
            expected = 10 * math.log10(float(values.square().sum()) / noise) if noise else math.inf
            assert weight.sqnr_db == pytest.approx(expected, abs=0.05)  # of the signal, rounded or not


def test_changed_codes_and_scales_are_counted(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "fp8", "fp8-block", **fp8_directories.RAGGED)
    fp8_directories.make(tmp_path / "other", "fp8-block", **fp8_directories.RAGGED)
    file = tmp_path / "other" / "model.safetensors"
    stored = load_file(file)
    codes = stored[UP].view(torch.uint8)
    codes[5, 7:10] ^= 1
    stored[f"{UP}_scale_inv"][2, 1] *= 4
    save_file(stored, file, metadata={"format": "pt"})
    found = compared(tmp_path / "fp8", tmp_path / "other")
    assert [name for name, weight in found.items() if weight.changed or weight.scale_ratio != (1, 1)] == [UP]
    assert found[UP].changed == 3 and found[UP].scale_ratio == (1.0, 4.0) and found[UP].idempotent


def test_values_are_held_against_the_scales_that_they_had(tmp_path: Path) -> None:
    """A directory of values with encodings, against codes under twice the scales: every code but zeros is another."""
    fp8_directories.make(tmp_path / "fp8", "modelopt-channel")
    run(tmp_path / "fp8", tmp_path / "bf16", "hf")
    file = tmp_path / "fp8" / "model.safetensors"
    stored = load_file(file)
    stored[f"{UP}_scale"] *= 2
    save_file(stored, file, metadata={"format": "pt"})
    found = compared(tmp_path / "bf16", tmp_path / "fp8")[UP]
    assert found.scale_ratio == (2.0, 2.0) and found.changed == 0
    values = load_file(tmp_path / "bf16" / "model.safetensors")
    values[UP] *= 2
    save_file(values, tmp_path / "bf16" / "model.safetensors", metadata={"format": "pt"})
    again = compared(tmp_path / "bf16", tmp_path / "fp8")[UP]
    doubled = stored[UP].float() * 2
    expected = doubled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8) != stored[UP].view(torch.uint8)
    assert again.changed == int(expected.sum()) and 50 < again.sqnr_db < 60  # BF16's rounding


def test_codes_beyond_bf16_are_not_the_same_after_it(tmp_path: Path) -> None:
    """Under a scale of 2^-130 small codes fall among BF16's subnormal numbers."""
    fp8_directories.make(tmp_path / "fp8", "fp8-tensor-dynamic")
    file = tmp_path / "fp8" / "model.safetensors"
    stored = load_file(file)
    stored[f"{UP}_scale"] = torch.tensor(2.0**-130)
    save_file(stored, file, metadata={"format": "pt"})
    found = compared(tmp_path / "fp8", None)
    assert [name for name, weight in found.items() if not weight.idempotent] == [UP]
    assert found[UP].changed > 0


def test_no_number_against_itself_is_the_same_in_every_table_and_ratios_have_one_order(tmp_path: Path) -> None:
    """A code of NaN, and channels whose scales are 0 on both sides, and on one alone."""
    scales = {"one": (0.0, 0.0, 0.5), "other": (0.0, 0.5, 0.5)}
    for name, first in scales.items():
        fp8_directories.make(tmp_path / name, "modelopt-channel")
        stored = load_file(tmp_path / name / "model.safetensors")
        stored[UP].view(torch.uint8)[9, 3] = 0x7F
        stored[f"{UP}_scale"][:3] = torch.tensor(first)
        save_file(stored, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    one, other = (open_checkpoint(tmp_path / name) for name in scales)
    found = compare(one, one, fp8=True)
    (tensor,) = [each for each in found.tensors if each.name == UP]
    (weight,) = [each for each in found.codes if each.name == UP]
    assert (tensor.status, tensor.sqnr_db) == ("exact", math.inf)
    assert (weight.changed, weight.sqnr_db, weight.scale_ratio) == (0, math.inf, (1.0, 1.0))
    assert not weight.idempotent  # under a scale of 0 every code is 0 after it
    for a, b, ratio in ((one, other, (1.0, math.inf)), (other, one, (0.0, 1.0))):
        (weight,) = [each for each in compare(a, b, fp8=True).codes if each.name == UP]
        assert weight.scale_ratio == ratio


@pytest.mark.parametrize("broken", [math.nan, *in_soak(math.inf)])
def test_codes_against_no_number_have_no_sqnr(tmp_path: Path, broken: float) -> None:
    fp8_directories.make(tmp_path / "fp8", "fp8-tensor-dynamic")
    run(tmp_path / "fp8", tmp_path / "bf16", "hf")
    values = load_file(tmp_path / "bf16" / "model.safetensors")
    values[UP][0, 0] = broken
    save_file(values, tmp_path / "bf16" / "model.safetensors", metadata={"format": "pt"})
    for sides in (("fp8", "bf16"), ("bf16", "fp8")):
        found = compared(*(tmp_path / side for side in sides))
        assert found[UP].sqnr_db == -math.inf and found[UP].changed


def test_the_command_shows_and_tells_json(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "fp8", "fp8-block")
    run(tmp_path / "fp8", tmp_path / "bf16", "hf")
    alone = CliRunner().invoke(main, ["verify", str(tmp_path / "fp8"), "--fp8"])
    assert alone.exit_code == 0 and "all 14" in alone.stdout and "the same after BF16" in alone.stdout
    found = CliRunner().invoke(main, ["verify", str(tmp_path / "fp8"), str(tmp_path / "bf16"), "--fp8", "--json"])
    assert found.exit_code == 0
    codes = json.loads(found.stdout)["codes"]
    assert len(codes) == 14 and all(weight["changed"] == 0 and weight["idempotent"] for weight in codes)
    plain = CliRunner().invoke(main, ["verify", str(tmp_path / "bf16"), "--fp8"])
    assert plain.exit_code == 1
    assert CliRunner().invoke(main, ["verify", str(tmp_path / "fp8")]).exit_code == 2
