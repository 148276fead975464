"""HQQ: integers of 1 to 8 bits in safetensors, decoded to BF16 by every command."""

import json
from collections.abc import Callable
from pathlib import Path

import hqq_directories
import pytest
import repository
import torch
from hqq_directories import letters
from read_as_values import assert_read_as_values
from safetensors.torch import load_file, save_file
from torch import Tensor

from precisionctl.checkpoints.chunks import read_rows, read_tensor
from precisionctl.checkpoints.decoded.hqq_codes import HqqCodes
from precisionctl.checkpoints.hf_directory.safetensors_file import StoredTensors, read_header
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError, PrecisionError

MODULE = "model.layers.0.mlp.up_proj"
UP = f"{MODULE}.weight"
GOLDEN = repository.GOLDEN / "hqq_codes.safetensors"


@pytest.mark.parametrize("spelling", hqq_directories.SPELLINGS)
def test_values_are_those_of_a_slow_reader_in_bf16_and_through_megatron(tmp_path: Path, spelling: str) -> None:
    values = hqq_directories.make(tmp_path / "source", spelling)
    words = f"{spelling[4]}-bit integers of hqq, read as bfloat16"
    _, found = assert_read_as_values(tmp_path / "source", values, words, megatron=spelling == "hqq-3-columns")
    assert len(values) == 7 and {name.rpartition(".")[2] for name in found} == {"weight"}


def test_a_directory_that_hqq_saved_itself_names_no_method(tmp_path: Path) -> None:
    values = hqq_directories.make(tmp_path, "hqq-4")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(read_tensor(open_checkpoint(tmp_path), UP), values[UP])


CASES = sorted(name.removesuffix(".decoded") for name in load_file(GOLDEN) if name.endswith(".decoded"))


@pytest.mark.parametrize("case", CASES)
def test_what_hqq_has_coded_is_what_it_makes_of_it(case: str) -> None:
    stored = StoredTensors({name: (GOLDEN, tensor) for name, tensor in read_header(GOLDEN).items()})
    found = read_tensor(HqqCodes(stored, {"quantization_config": {"quant_method": "hqq"}}, GOLDEN), f"{case}.weight")
    assert torch.equal(found, load_file(GOLDEN)[f"{case}.decoded"].bfloat16())


def test_there_is_a_golden_weight_of_each_number_of_bits_along_both_axes() -> None:
    bits = ("8", "6", "5", "4", "3", "2", "1_58", "1")
    each = {f"bits-{n}-axis-{axis}" for n in bits for axis in ("1-bfloat16", "0-float16")}
    assert {*CASES} == each | {"bits-4-axis-1-float32", "columns"}


@pytest.mark.parametrize("spelling", ["hqq-4", "hqq-3-columns"])
def test_how_rows_are_cut_does_not_matter(tmp_path: Path, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an expert whose rows begin within groups, and one in piece by piece."""
    sizes = {"moe_intermediate_size": 80, "num_hidden_layers": 2}
    values = hqq_directories.make(tmp_path, spelling, "qwen3-moe", **sizes)
    monkeypatch.setattr("precisionctl.checkpoints.decoded.base.PIECE", 300)
    reader = open_checkpoint(tmp_path)
    name = next(name for name in values if ".experts.1.down_proj" in name)
    assert torch.equal(read_tensor(reader, name), values[name])
    for row, rows in ((0, 1), (31, 2), (33, 64), (127, 1)):
        assert torch.equal(read_rows(reader, name, row, rows), values[name][row : row + rows])


def put(name: str, tensor: Tensor | None) -> Callable[[dict[str, Tensor]], None]:
    """Another tensor in the place of one, or none."""

    def changed(tensors: dict[str, Tensor]) -> None:
        tensors.pop(f"{MODULE}.{name}", None)
        tensors.update({} if tensor is None else {f"{MODULE}.{name}": tensor})

    return changed


def number(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int32)


ON = torch.tensor(1, dtype=torch.uint8)
HOSTILE: dict[str, tuple[Callable[[dict[str, Tensor]], None], type[PrecisionctlError], str]] = {
    "no scale": (put("scale", None), DamagedCheckpoint, "no .*up_proj.scale for its codes"),
    "no shape": (put("shape", None), DamagedCheckpoint, "no .*up_proj.shape for its codes"),
    "no packing": (put("packing", None), DamagedCheckpoint, "no .*up_proj.packing for its codes"),
    "another packing": (put("packing", letters("4bit_u4")), PrecisionError, "packed as '4bit_u4'"),
    "a packing of SINQ alone": (put("packing", letters("6bit_32")), PrecisionError, "packed as '6bit_32'"),
    "a packing of numbers": (put("packing", torch.ones(7)), DamagedCheckpoint, "not up to 32 letters"),
    "a long packing": (put("packing", letters("4" * 33)), DamagedCheckpoint, "not up to 32 letters"),
    "no letters": (put("packing", letters("")), DamagedCheckpoint, "not up to 32 letters"),
    "bytes that are no letters": (put("packing", torch.full((7,), 255).byte()), PrecisionError, "packed as"),
    "computed in FP64": (put("compute_dtype", letters("torch.float64")), PrecisionError, "in 'torch.float64'"),
    "a shape of three": (put("shape", torch.tensor([2, 48, 128])), DamagedCheckpoint, "shape is int64 of shape"),
    "a shape below zero": (put("shape", torch.tensor([-96, -128])), DamagedCheckpoint, "codes of .-96, -128."),
    "a huge shape": (put("shape", torch.tensor([1 << 62, 128])), DamagedCheckpoint, "W_q is uint8"),
    "a row more": (put("shape", torch.tensor([97, 128])), DamagedCheckpoint, "W_q is uint8"),
    "no group": (put("group_size", number(0)), DamagedCheckpoint, "in groups of 0"),
    "an odd group": (put("group_size", number(63)), DamagedCheckpoint, "in groups of 63"),
    "a third axis": (put("axis", number(2)), DamagedCheckpoint, "along axis 2"),
    "the other axis": (put("axis", number(0)), DamagedCheckpoint, "W_q is uint8"),
    "an axis of two": (put("axis", torch.zeros(2, dtype=torch.int32)), DamagedCheckpoint, "axis is int32 of shape"),
    "an axis in FP32": (put("axis", torch.tensor(1.0)), DamagedCheckpoint, "axis is float32"),
    "codes in INT8": (put("W_q", torch.zeros(96, 64, dtype=torch.int8)), DamagedCheckpoint, "W_q is int8"),
    "codes as floats": (put("view_as_float", ON), PrecisionError, "`view_as_float`"),
    "scales in codes": (put("quant_scale", ON), PrecisionError, "`quant_scale`"),
    "zero points in codes": (put("quant_zero", ON), PrecisionError, "`quant_zero`"),
    "a scale of integers": (put("scale", torch.ones(192, 1).int()), DamagedCheckpoint, "scale is int32"),
    "a flat scale": (put("scale", torch.ones(192)), DamagedCheckpoint, "scale is float32 of shape"),
    "a scale of NaN": (put("scale", torch.full((192, 1), torch.nan)), DamagedCheckpoint, "infinite or NaN"),
    "an endless zero point": (put("zero", torch.full((192, 1), torch.inf)), DamagedCheckpoint, "infinite or NaN"),
    "a weight as values too": (put("weight", torch.ones(96, 128)), DamagedCheckpoint, "as values, and as codes"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hqq")
    hqq_directories.make(directory, "hqq-4")
    return directory


@pytest.mark.parametrize("case", HOSTILE)
def test_tensors_that_contradict_one_another_are_one_error(tmp_path: Path, made: Path, case: str) -> None:
    changed, error, match = HOSTILE[case]
    tensors = load_file(made / "model.safetensors")
    changed(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((made / "config.json").read_bytes())
    with pytest.raises(error, match=match):
        read_tensor(open_checkpoint(tmp_path), UP)
