"""EETQ: INT8 codes in the order of its kernel, decoded to BF16 by every command."""

from pathlib import Path

import coded_directories
import pytest
import repository
import torch
from coded_directories import SIZES
from hostile_codes import UP, Hostile, assert_refused, put
from read_as_values import assert_any_cut, assert_golden, assert_read_as_values, golden_cases
from torch import Tensor

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import DamagedCheckpoint, PrecisionError

GOLDEN = repository.GOLDEN / "eetq_codes.safetensors"


def ordered(codes: Tensor) -> Tensor:
    """Codes `[out, in]` as EETQ stores them, `[in, out]`: one byte after the other, by its own steps."""
    out, inputs = codes.shape
    rows = codes.t().tolist()
    mixed = [rows[row // 16 * 16 + 8 * (row % 4 // 2) + row % 2 + 2 * (row % 16 // 4)] for row in range(inputs)]
    flat = [0] * (out * inputs)
    for column in range(out):
        for row in range(inputs):
            tile, within = divmod(row, 64)
            at = column // 2 * 2 * inputs + tile * 128 + column % 2 * 64 + within
            flat[at ^ (3 if at % 4 in (1, 2) else 0)] = (mixed[row][column] + 128 + 128) % 256 - 128
    return torch.tensor(flat, dtype=torch.int8).view(inputs, out)


def coded(name: str, weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes = torch.randint(-127, 127, weight.shape, generator=generator)
    codes[torch.arange(len(codes)), torch.randint(weight.shape[1], (len(codes),), generator=generator)] = -128
    scales = (torch.rand(len(codes), generator=generator) * 0.01 + 0.001).half()
    return {name: ordered(codes), f"{name}_scales": scales}, codes.half() * scales.unsqueeze(1)


def make(directory: Path) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    said = {"quant_method": "eetq", "weights": "int8", "modules_to_not_convert": ["lm_head"]}
    sizes = SIZES | {"intermediate_size": 192}
    return coded_directories.make(
        directory, "llama-3", said, lambda name, weight: coded(name, weight, generator), **sizes
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    directory = tmp_path_factory.mktemp("eetq") / "source"
    return directory, make(directory)


def test_values_are_those_of_a_slow_reader_in_bf16_and_through_megatron(made: tuple[Path, dict[str, Tensor]]) -> None:
    source, values = made
    _, found = assert_read_as_values(source, values, "INT8 codes of eetq, read as bfloat16", megatron=True)
    assert len(values) == 7 and {name.rpartition(".")[2] for name in found} == {"weight"}


@pytest.mark.parametrize("case", golden_cases(GOLDEN))
def test_what_eetq_has_coded_is_what_its_codes_stand_for(case: str) -> None:
    assert_golden(GOLDEN, case, {"quant_method": "eetq"})


def test_how_rows_are_cut_does_not_matter(
    made: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor that a run of them begins with the second of two outputs."""
    assert_any_cut(made[0], UP, made[1][UP], monkeypatch, piece=400)


CODES = torch.full((128, 192), 1, dtype=torch.int8)
HOSTILE: Hostile = {
    "no scales": (put("weight_scales", None), DamagedCheckpoint, "no .*up_proj.weight_scales for its codes"),
    "no codes": (put("weight", None), DamagedCheckpoint, "no .*up_proj.weight for its codes"),
    "codes of values": (put("weight", CODES.half()), DamagedCheckpoint, "weight is float16"),
    "flat codes": (put("weight", CODES.flatten()), DamagedCheckpoint, "no codes in tiles of 64"),
    "codes of nothing": (put("weight", CODES[:0]), DamagedCheckpoint, "no codes in tiles of 64"),
    "half a tile": (put("weight", CODES[:96]), DamagedCheckpoint, "no codes in tiles of 64"),
    "outputs of half a tile": (put("weight", CODES[:, :160]), DamagedCheckpoint, "no codes in tiles of 64"),
    "another order": (put("weight", CODES), PrecisionError, "order that is not read"),
    "scales of inputs": (put("weight_scales", torch.ones(128).half()), DamagedCheckpoint, "scales is float16 of shape"),
    "scales of integers": (put("weight_scales", torch.ones(192).int()), DamagedCheckpoint, "scales is int32"),
    "negative scales": (put("weight_scales", -torch.ones(192)), DamagedCheckpoint, r"scales holds a .*safetensors\)"),
    "scales of NaN": (put("weight_scales", torch.full((192,), torch.nan)), DamagedCheckpoint, "infinite or NaN"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_tensors_that_contradict_one_another_are_one_error(
    tmp_path: Path, made: tuple[Path, dict[str, Tensor]], case: str
) -> None:
    assert_refused(made[0], tmp_path, HOSTILE[case])


def test_a_row_of_zeros_has_no_largest_code(tmp_path: Path) -> None:
    def empty(name: str, weight: Tensor) -> tuple[dict[str, Tensor], None]:
        return {name: ordered(torch.zeros(weight.shape).int()), f"{name}_scales": torch.zeros(len(weight)).half()}, None

    coded_directories.make(tmp_path, "llama-3", {"quant_method": "eetq"}, empty, **SIZES | {"intermediate_size": 192})
    assert not read_tensor(open_checkpoint(tmp_path), UP).any()
