"""NVFP4, MXFP4 and INT4 in Hugging Face directories: decoded, compared, and brought back to the very codes."""

import json
from collections.abc import Callable
from pathlib import Path

import conversions
import four_bit_directories
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.param import Parallelism
from precisionctl.verify.code_comparison import compare_codes
from precisionctl.verify.compare import compare

EACH = pytest.mark.parametrize("spelling", four_bit_directories.SPELLINGS)
UP = "model.layers.0.mlp.up_proj."


def stored(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def save(directory: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert torch.equal(bits(a[name]), bits(b[name])), name


def run(*arguments: object, **options: object) -> list[str]:
    return list(conversions.run(*arguments, workers=1, verify=True, **options).notes)  # type: ignore[arg-type]


@EACH
def test_codes_are_what_a_slow_reader_makes_of_them_and_come_back_from_megatron_unchanged(
    tmp_path: Path, spelling: str
) -> None:
    """In BF16, of random codes under random scales; gate and up cut for two ranks. Negative zeros too."""
    values = four_bit_directories.make(tmp_path / "source", spelling)
    notes = run(tmp_path / "source", tmp_path / "bf16", "hf")
    assert any("`convert --to hf --precision fp8` writes the same codes again" in note for note in notes)
    decoded = stored(tmp_path / "bf16")
    assert len(values) == 7
    for name, expected in values.items():
        assert torch.equal(bits(decoded[name]), bits(expected.bfloat16())), name
    source, bf16 = open_checkpoint(tmp_path / "source"), open_checkpoint(tmp_path / "bf16")
    assert compare(source, bf16).equal
    codes = list(compare_codes(source, bf16))
    assert len(codes) == 7 and not any(code.changed for code in codes) and all(code.idempotent for code in codes)
    run(tmp_path / "source", tmp_path / "megatron", "megatron", parallelism=Parallelism(2))
    notes = run(tmp_path / "megatron", tmp_path / "back", "hf", precision="fp8")
    assert_same(stored(tmp_path / "back"), stored(tmp_path / "source"))
    assert any("7 of 7 weights have the same codes" in note for note in notes)
    config = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("source", "back")]
    assert config[0]["quantization_config"] == config[1]["quantization_config"]


def changed(directory: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Change one tensor of a directory."""
    tensors = stored(directory)
    tensors[name] = change(tensors[name].clone()).contiguous()
    save(directory, tensors)


def differing(a: Path, b: Path) -> dict[str, int]:
    """How many bytes differ in the tensors of two directories, where some do."""
    left, right = stored(a), stored(b)
    assert left.keys() == right.keys()
    counts = {name: int((bits(left[name]) != bits(right[name])).sum()) for name in left}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("spelling", ["ct-nvfp4", "ct-mxfp4", "ct-int4-32", "ct-int4-zero-points", "modelopt-nvfp4"])
def test_a_group_that_was_trained_gets_a_new_scale_and_the_others_keep_their_codes(
    tmp_path: Path, spelling: str
) -> None:
    """One value of the second row has doubled. Only that group has other codes, and another scale."""
    values = four_bit_directories.make(tmp_path / "source", spelling)
    spelled = four_bit_directories.SPELLINGS[spelling]
    group, name = spelled.group or 0, f"{UP}weight"
    run(tmp_path / "source", tmp_path / "bf16", "hf")
    largest = values[name][1, :group].abs().max()

    def trained(tensor: Tensor) -> Tensor:
        tensor[1, 0] = 0.7 * largest
        return tensor

    changed(tmp_path / "bf16", name, trained)
    notes = run(tmp_path / "bf16", tmp_path / "back", "hf", precision="fp8")
    assert any(note.startswith("1 have blocks with new scales") for note in notes)
    found = differing(tmp_path / "source", tmp_path / "back")
    assert found.keys() <= {f"{UP}{end}" for end in ("weight" + spelled.suffix, spelled.scale, "weight_zero_point")}
    codes = [stored(tmp_path / each)[f"{UP}weight{spelled.suffix}"].view(torch.uint8) for each in ("source", "back")]
    elsewhere = torch.ones(codes[0].shape, dtype=torch.bool)
    elsewhere[1, : group // 2] = False
    assert torch.equal(codes[0][elsewhere], codes[1][elsewhere])
    run(tmp_path / "back", tmp_path / "again", "hf")
    again = stored(tmp_path / "again")[name].float()
    assert again[1, 0] == pytest.approx(float(0.7 * largest), rel=0.3)
    step = float(again[1, :group].abs().max()) / 4
    assert (again[1, 1:group] - values[name][1, 1:group]).abs().max() <= step
