"""AQLM: sums of vectors out of codebooks, decoded to BF16 by every command."""

from pathlib import Path

import coded_directories
import pytest
import repository
import torch
from coded_directories import SIZES, of_module
from hostile_codes import UP, Hostile, assert_refused, put
from read_as_values import assert_any_cut, assert_decoded_once, assert_golden, assert_read_as_values, golden_cases
from torch import Tensor

from precisionctl.errors import DamagedCheckpoint, PrecisionError

GOLDEN = repository.GOLDEN / "aqlm_codes.safetensors"


def coded(
    name: str, weight: Tensor, books: int, bits: int, high: int, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """Random codes of vectors of 8 inputs and `high` outputs, codebooks and scales in FP16, and their values."""
    out, inputs = weight.shape
    codes = torch.randint(1 << bits, (out // high, inputs // 8, books), generator=generator)
    vectors = torch.randn(books, 1 << bits, high, 8, generator=generator).half()
    scales = torch.rand(out // high, 1, 1, 1, generator=generator).half()
    values = torch.empty(out, inputs)
    for row in range(out // high):
        for column in range(inputs // 8):
            found = sum(vectors[book, codes[row, column, book]].float() for book in range(books))
            values[row * high : row * high + high, column * 8 : column * 8 + 8] = found.half() * scales[row, 0, 0, 0]
    words = torch.int8 if bits == 8 else torch.int16
    wrapped = (codes - (codes >= 1 << bits - 1) * (1 << bits)).to(words)
    return of_module(name, {"codes": wrapped, "codebooks": vectors, "scales": scales}), values


def make(directory: Path, books: int, bits: int, high: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    said = {"quant_method": "aqlm", "num_codebooks": books, "nbits_per_codebook": bits, "in_group_size": 8}
    said |= {"out_group_size": high, "linear_weights_not_to_quantize": ["lm_head.weight"]}
    return coded_directories.make(
        directory, "llama-3", said, lambda name, weight: coded(name, weight, books, bits, high, generator), **SIZES
    )


@pytest.mark.parametrize(("books", "bits", "high"), [(2, 8, 1), (1, 12, 4)])
def test_values_are_those_of_a_slow_reader_in_bf16_and_through_megatron(
    tmp_path: Path, books: int, bits: int, high: int
) -> None:
    values = make(tmp_path / "source", books, bits, high)
    words = f"{books}x{bits}-bit codes of aqlm, read as bfloat16"
    _, found = assert_read_as_values(tmp_path / "source", values, words, megatron=high == 4)
    assert len(values) == 7 and {name.rpartition(".")[2] for name in found} == {"weight"}


@pytest.mark.parametrize("case", golden_cases(GOLDEN))
def test_codes_decode_to_what_aqlm_makes_of_them(case: str) -> None:
    assert_golden(GOLDEN, case, {"quant_method": "aqlm"})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    directory = tmp_path_factory.mktemp("aqlm")
    return directory, make(directory, 2, 8, 4)


def test_how_rows_are_cut_does_not_matter(
    made: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor that a run of them begins within those of a vector."""
    assert_any_cut(made[0], UP, made[1][UP], monkeypatch)


def test_a_vector_of_all_outputs_is_not_decoded_anew_for_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be, 96 times, where memory is for a row at a time."""
    generator, said = torch.Generator().manual_seed(1), {"quant_method": "aqlm"}
    values = coded_directories.make(
        tmp_path, "llama-3", said, lambda *weight: coded(*weight, 2, 8, 96, generator), lambda name: name == UP, **SIZES
    )
    assert_decoded_once(tmp_path, UP, values[UP], monkeypatch)


BOOKS = torch.ones(2, 256, 4, 8).half()
HOSTILE: Hostile = {
    "no scales": (put("scales", None), DamagedCheckpoint, "no .*up_proj.scales for its codes"),
    "no codes": (put("codes", None), DamagedCheckpoint, "no .*up_proj.codes for its codes"),
    "no codebooks": (put("codebooks", None), DamagedCheckpoint, "no .*up_proj.codebooks for its codes"),
    "codes in FP32": (put("codes", torch.ones(24, 16, 2)), DamagedCheckpoint, "codes is float32"),
    "flat codes": (put("codes", torch.ones(24, 32).char()), DamagedCheckpoint, "codes is int8 of shape"),
    "codes of nothing": (put("codes", torch.ones(0, 16, 2).char()), DamagedCheckpoint, "codes is int8 of shape"),
    "codes of a third book": (put("codes", torch.ones(24, 16, 3).char()), DamagedCheckpoint, "codes is int8 of shape"),
    "a book of 255": (put("codebooks", BOOKS[:, 1:]), DamagedCheckpoint, "beside codebooks in float16"),
    "books too long": (put("codebooks", BOOKS.repeat(1, 2, 1, 1)), DamagedCheckpoint, "beside codebooks in float16"),
    "a flat book": (put("codebooks", BOOKS[0]), DamagedCheckpoint, "beside codebooks in float16"),
    "vectors of nothing": (put("codebooks", BOOKS[..., :0]), DamagedCheckpoint, "beside codebooks in float16"),
    "integers in books": (put("codebooks", BOOKS.char()), DamagedCheckpoint, "beside codebooks in int8"),
    "a huge book": (put("codebooks", torch.ones(2, 1, 1, 1 << 23 | 1).half()), PrecisionError, "16,777,218 numbers"),
    "scales in FP32": (put("scales", torch.ones(24, 1, 1, 1)), DamagedCheckpoint, "scales is float32"),
    "scales of columns": (put("scales", torch.ones(1, 32).half()), DamagedCheckpoint, "scales is float16 of shape"),
    "a book of NaN": (put("codebooks", BOOKS * torch.nan), DamagedCheckpoint, "infinite or NaN"),
    "a weight as values too": (put("weight", torch.ones(96, 128)), DamagedCheckpoint, "as values, and as codes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_tensors_that_contradict_one_another_are_one_error(
    tmp_path: Path, made: tuple[Path, dict[str, Tensor]], case: str
) -> None:
    assert_refused(made[0], tmp_path, HOSTILE[case])
