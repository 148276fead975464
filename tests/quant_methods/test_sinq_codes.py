"""SINQ: integers with scales of groups and of inputs, decoded to BF16 by every command."""

import json
from pathlib import Path
from typing import Any

import coded_directories
import pytest
import repository
import torch
from coded_directories import SIZES, of_module
from hostile_codes import MODULE, UP, Change, Hostile, assert_refused, put, stray
from hqq_directories import PACKINGS, packed
from read_as_values import assert_any_cut, assert_golden, assert_read_as_values, golden_cases
from torch import Tensor

from precisionctl.checkpoints.hf_directory.safetensors_file import read_described
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import DamagedCheckpoint, PrecisionError, UnmappedTensor

GOLDEN = repository.GOLDEN / "sinq_codes.safetensors"
MODULES = "model.safetensors.index.json.meta.json"
GROUP = 32


def coded(name: str, weight: Tensor, bits: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Random codes of a weight, computed in BF16 with scales in FP16 that are codes themselves, and its values."""
    groups = weight.numel() // GROUP
    codes = torch.randint(1 << bits, (groups, GROUP), generator=generator)
    bytes_of_scales = torch.randint(256, (32, groups // 32), generator=generator).byte()
    steps, least = (torch.rand(1, groups // 32, generator=generator).half() * part for part in (1e-4, 1e-2))
    zeros = (torch.rand(groups, 1, generator=generator) * (1 << bits)).half()
    of_inputs = (torch.rand(1, weight.shape[1], generator=generator) + 0.5).half()
    scales = (bytes_of_scales.half() * steps + least).view(groups, 1)
    # What is of two dtypes of 16 bits is computed in FP32
    rows = ((codes.float() - zeros.float()) * scales.float()).view(weight.shape)
    stored = {
        "W_q": packed(codes, bits),
        "meta.scale.x": bytes_of_scales,
        "meta.scale.s": steps,
        "meta.scale.m": least,
        "meta.zero": zeros,
        "meta.scale2": of_inputs,
    }
    return of_module(name, stored), (rows * of_inputs.float()).bfloat16()


def make(directory: Path, bits: int) -> dict[str, Tensor]:
    """Save a small model whose linears are codes, as sinq does: config.json says nothing of them."""
    generator, modules = torch.Generator().manual_seed(1), dict[str, Any]()

    def noted(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        meta = {"nbits": bits, "group_size": GROUP, "shape": list(weight.shape), "awq_scale": None, "axis": 1}
        meta |= {"packing": PACKINGS[bits], "method": "sinq_quantAux", "view_as_float": False}
        meta |= {"compute_dtype": "torch.bfloat16", "unpack_view_dtype": "torch.uint8"}
        modules[name.removesuffix(".weight")] = {"meta": meta}
        return coded(name, weight, bits, generator)

    values = coded_directories.make(directory, "llama-3", {}, noted, **SIZES)
    (directory / MODULES).write_text(json.dumps(modules))
    return values


@pytest.mark.parametrize("bits", [4, 3])
def test_values_are_those_of_a_slow_reader_in_bf16_and_through_megatron(tmp_path: Path, bits: int) -> None:
    values = make(tmp_path / "source", bits)
    words = f"{bits}-bit integers of sinq, read as bfloat16"
    _, found = assert_read_as_values(tmp_path / "source", values, words, megatron=bits == 3)
    assert len(values) == 7 and {name.rpartition(".")[2] for name in found} == {"weight"}
    assert not (tmp_path / "bf16" / MODULES).exists()


@pytest.mark.parametrize("case", golden_cases(GOLDEN))
def test_what_sinq_has_coded_is_what_it_makes_of_it(case: str) -> None:
    assert_golden(GOLDEN, case, {"quant_method": "sinq", "modules": json.loads(read_described(GOLDEN)[1]["modules"])})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    directory = tmp_path_factory.mktemp("sinq")
    return directory, make(directory, 4)


def test_how_rows_are_cut_does_not_matter(
    made: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert made[1][UP].dtype == torch.bfloat16
    assert_any_cut(made[0], UP, made[1][UP], monkeypatch)


def says(**changed: object) -> Change:
    """Other settings of MODULE."""
    return lambda tensors, said: said[MODULE]["meta"].update(changed)


HOSTILE: Hostile = {
    "no scale": (put("meta.scale.x", None), DamagedCheckpoint, "no .*up_proj.meta.scale.x for its codes"),
    "no steps": (put("meta.scale.s", None), DamagedCheckpoint, "no .*up_proj.meta.scale.s for its codes"),
    "scales twice": (
        put("meta.scale", torch.ones(384, 1).half()),
        DamagedCheckpoint,
        r"meta.scale is there, and as codes: .*\.meta\.scale\.m .*model\.safetensors\)",
    ),
    "zeros, and a step": (put("meta.zero.s", torch.ones(1, 12).half()), DamagedCheckpoint, "and as codes: .*zero.s"),
    "a tensor of no module": (stray("model.meta.weight", torch.ones(2)), UnmappedTensor, "model.meta.weight"),
    "another tensor of a module": (put("meta.awq_scale", torch.ones(1, 128)), UnmappedTensor, "meta.awq_scale"),
    "no zero": (put("meta.zero", None), DamagedCheckpoint, "no .*up_proj.meta.zero for its codes"),
    "no scales of inputs": (put("meta.scale2", None), DamagedCheckpoint, "no .*up_proj.meta.scale2 for its codes"),
    "scales in FP32": (put("meta.scale.x", torch.ones(32, 12)), DamagedCheckpoint, "scale.x is float32"),
    "too few scales": (put("meta.scale.x", torch.ones(31, 12).byte()), DamagedCheckpoint, "scale.x is uint8 of shape"),
    "scales of nothing": (put("meta.scale.x", torch.ones(32, 0).byte()), DamagedCheckpoint, "scale.x is uint8 of"),
    "steps of rows": (put("meta.scale.s", torch.ones(12, 1).half()), DamagedCheckpoint, "scale.s is float16 of shape"),
    "flat zeros": (put("meta.zero", torch.ones(384).half()), DamagedCheckpoint, "zero is float16 of shape"),
    "zeros of NaN": (put("meta.zero", torch.full((384, 1), torch.nan)), DamagedCheckpoint, "infinite or NaN"),
    "scales of outputs": (put("meta.scale2", torch.ones(1, 96).half()), DamagedCheckpoint, "scale2 is float16 of"),
    "tiles": (put("meta.scale2", torch.ones(12, 1, 32).half()), PrecisionError, "in square tiles"),
    "codes of INT8": (put("W_q", torch.ones(192, 32).char()), DamagedCheckpoint, "W_q is int8"),
    "a weight as values too": (put("weight", torch.ones(96, 128)), DamagedCheckpoint, "as values, and as codes"),
    "not said": (lambda _, said: said.clear(), DamagedCheckpoint, "does not say which"),
    "said in a word": (
        lambda _, said: said.update({MODULE: "4bit"}),
        DamagedCheckpoint,
        "not an object of objects",
    ),
    "another packing": (says(packing="4bit_u4"), PrecisionError, "packed as '4bit_u4'"),
    "a list of packings": (says(packing=["4bit_u8"]), PrecisionError, "packed as "),
    "other bits": (says(packing="8bit_u8"), DamagedCheckpoint, "W_q is uint8 of shape"),
    "numbers of a table": (says(method="sinq_nf4"), PrecisionError, "by 'sinq_nf4'"),
    "codes as floats": (says(view_as_float=True), PrecisionError, "which are not read"),
    "computed in FP64": (says(compute_dtype="torch.float64"), PrecisionError, "computed in 'torch.float64'"),
    "a shape of three": (says(shape=[1, 96, 128]), DamagedCheckpoint, "makes no sense"),
    "no shape": (says(shape=None), DamagedCheckpoint, "makes no sense"),
    "a huge shape": (says(shape=[1 << 60, 128]), DamagedCheckpoint, "W_q is uint8 of shape"),
    "groups of outputs": (says(axis=0), DamagedCheckpoint, "along axis 0"),
    "odd groups": (says(group_size=33), DamagedCheckpoint, "in groups of 33"),
    "groups of nothing": (says(group_size=0), DamagedCheckpoint, "in groups of 0"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_contradicts_itself_or_is_not_read_is_one_error(
    tmp_path: Path, made: tuple[Path, dict[str, Tensor]], case: str
) -> None:
    assert_refused(made[0], tmp_path, HOSTILE[case], MODULES)


def test_a_directory_without_the_file_beside_the_index_is_refused(
    tmp_path: Path, made: tuple[Path, dict[str, Tensor]]
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).hardlink_to(made[0] / name)
    with pytest.raises(DamagedCheckpoint, match=f"{MODULES} does not say which"):
        open_checkpoint(tmp_path)
