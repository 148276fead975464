"""Edges between formats of codes: said to be exact, or counted; and that is what they are."""

from pathlib import Path

import conversions
import four_bit_directories
import pytest
import torch
from safetensors.torch import load_file, save_file
from soaking import first
from torch import Tensor

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.request import Request
from precisionctl.conversion import buffers
from precisionctl.verify.compare import compare

ELEMENTS = 98_304
"""Of the seven linears."""


@pytest.fixture(autouse=True)
def several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are converted in pieces, as those of real models are: each of these is larger than the buffer."""
    monkeypatch.setattr(buffers, "BUFFER", 1 << 13)


def exported(source: Path, out: Path, scheme: str, target: str = "vllm") -> list[str]:
    """The notes of an export."""
    request = Request.export(source, out, target, scheme, keep_misfits=True)  # type: ignore[arg-type]
    return list(conversions.carry_out(request, verify=True, workers=1).notes)


def values_of(directory: Path, place: Path) -> dict[str, Tensor]:
    conversions.run(directory, place, "hf", precision="fp32", workers=1)
    return load_file(place / "model.safetensors")


@pytest.mark.parametrize(
    ("spelling", "scheme", "target", "said"),
    first(
        4,
        [
            ("ct-mxfp4", "mxfp8", "vllm", "from MXFP4 to MXFP8: exact:"),
            ("modelopt-mxfp4", "mxfp8", "vllm", "from MXFP4 to MXFP8: exact:"),
            ("ct-mxfp4", "block", "vllm", "from MXFP4 to FP8: exact where"),
            ("ct-mxfp4", "dynamic", "vllm", "from MXFP4 to FP8: rounded once more"),
            ("ct-nvfp4", "dynamic", "vllm", "from NVFP4 to FP8: rounded once more"),
            ("ct-nvfp4", "nvfp4", "tensorrt-llm", "in NVFP4: rounded once more"),
            ("ct-int4-128", "mxfp8", "vllm", "from INT4 to MXFP8: rounded once more"),
            ("ct-int4-128", "w4a16", "vllm", "in INT4: the same codes"),
            ("ct-int4-128-zero-points", "w4a16", "vllm", "in INT4: rounded once more"),
        ],
    ),
)
def test_an_edge_is_what_it_is_said_to_be_and_the_values_that_differ_are_counted(
    tmp_path: Path, spelling: str, scheme: str, target: str, said: str
) -> None:
    """By the command, and by `verify` of the two; the values before are a slow reader's."""
    before = four_bit_directories.make(tmp_path / "source", spelling)
    notes = exported(tmp_path / "source", tmp_path / "out", scheme, target)
    (note,) = [note for note in notes if said in note]
    taken = int(note.split()[0])
    after = values_of(tmp_path / "out", tmp_path / "values")
    differing = sum(int((after[name] != values).sum()) for name, values in before.items())
    assert (differing == 0) == ("exact" in said or "same" in said)
    found = compare(open_checkpoint(tmp_path / "source"), open_checkpoint(tmp_path / "out"))
    assert sum(tensor.differing or 0 for tensor in found.tensors) == differing
    if "same" in said:
        assert f"{taken} of {taken} weights have the same codes and scales as before." in notes
        return
    (counted,) = [note for note in notes if " are exactly what they were: " in note]
    assert f"{differing:,} of" in counted if differing else counted.endswith("no value differs.")


@pytest.mark.parametrize("span", [14, 15])
def test_mxfp4_is_exact_in_fp8_blocks_as_far_as_e4m3_reaches(tmp_path: Path, span: int) -> None:
    """E4M3 has six times the largest power of two, 6 * 2^6, and half of the smallest, 2^-9."""
    four_bit_directories.make(tmp_path / "source", "ct-mxfp4", quantized=lambda name: "up_proj" in name)
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    scales = tensors["model.layers.0.mlp.up_proj.weight_scale"]
    scales.fill_(100)
    scales[5, 1] += span
    save_file(tensors, file, metadata={"format": "pt"})
    notes = exported(tmp_path / "source", tmp_path / "out", "block")
    (counted,) = [note for note in notes if "exactly what they were" in note]
    assert ("no value differs" in counted) == (span == 14)
    a, b = (values_of(tmp_path / each, tmp_path / f"{each}-values") for each in ("source", "out"))
    name = "model.layers.0.mlp.up_proj.weight"
    lost = a[name] != b[name]
    assert bool(lost.any()) == (span == 15) and torch.equal(a[name][5, 32:64], b[name][5, 32:64])


def test_what_four_bits_lose_of_fp8_weights_is_counted(tmp_path: Path) -> None:
    four_bit_directories.make(tmp_path / "source", "ct-mxfp4")
    exported(tmp_path / "source", tmp_path / "fp8", "dynamic")
    notes = exported(tmp_path / "fp8", tmp_path / "out", "w4a16")
    assert "7 weights from FP8 to INT4: rounded once more; the values that differ are counted." in notes
    (counted,) = [note for note in notes if "exactly what they were" in note]
    assert counted.startswith("0 of 7 weights from FP8 to INT4") and f"of {ELEMENTS:,} values differ" in counted


def test_integers_with_zero_points_are_not_taken_for_integers_without(tmp_path: Path) -> None:
    """Their scales are of the same groups; under these the same codes would be other values."""
    before = four_bit_directories.make(tmp_path / "source", "ct-int4-128-zero-points")
    exported(tmp_path / "source", tmp_path / "out", "w4a16")
    after = values_of(tmp_path / "out", tmp_path / "values")
    for name, values in before.items():
        lost = (after[name] - values).square().sum() / values.square().sum()
        assert lost < 10**-1.8  # 18 dB; under the other codes' zero points it was 11
