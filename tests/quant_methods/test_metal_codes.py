"""transformers' integers for Apple's GPUs (`quant_method: metal`), decoded to BF16 by every command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coded_directories
import pytest
import torch
from coded_directories import SIZES, of_module
from read_as_values import assert_read_as_values
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.metal_quantization import _affine_quantize_tensor

from precisionctl.checkpoints.chunks import read_rows, read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError, PrecisionError

MODULE = "model.layers.0.mlp.up_proj"
UP = f"{MODULE}.weight"


def make(directory: Path, bits: int, group: int, scales: torch.dtype) -> dict[str, Tensor]:
    """Save a small model whose linears are codes, as transformers makes them. Returns what it loads of them."""

    def coded(name: str, weight: Tensor) -> tuple[dict[str, Tensor], None]:
        words, steps, biases = _affine_quantize_tensor(weight, group, bits)
        return of_module(name, {"weight": words, "scales": steps.to(scales), "qbiases": biases.to(scales)}), None

    said = {"quant_method": "metal", "bits": bits, "group_size": group, "modules_to_not_convert": ["lm_head"]}
    names = coded_directories.make(directory, "llama-3", said, coded, **SIZES | {"intermediate_size": 256})
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, device_map="cpu").state_dict()
    return {name: loaded[name] for name in names}


SPELLINGS = [(4, 64, torch.bfloat16), (2, 32, torch.float32), (8, 128, torch.float16)]


@pytest.mark.parametrize(("bits", "group", "scales"), SPELLINGS)
def test_values_are_those_that_transformers_loads(tmp_path: Path, bits: int, group: int, scales: torch.dtype) -> None:
    """Where there is no such GPU, as here."""
    values = make(tmp_path / "source", bits, group, scales)
    _, found = assert_read_as_values(tmp_path / "source", values, f"{bits}-bit integers of metal, read as bfloat16")
    assert len(values) == 7 and {name.rpartition(".")[2] for name in found} == {"weight"}
    assert {expected.dtype for expected in values.values()} == {scales}


def test_how_rows_are_cut_does_not_matter(
    made: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precisionctl.checkpoints.decoded.base.PIECE", 300)
    reader, expected = open_checkpoint(made[0]), made[1][UP]
    assert expected.dtype == torch.bfloat16 and torch.equal(read_tensor(reader, UP), expected)
    assert torch.equal(read_rows(reader, UP, 31, 33), expected[31:64])


def put(name: str, tensor: Tensor | None) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    """Another tensor in the place of one, or none."""

    def changed(tensors: dict[str, Tensor], said: dict[str, Any]) -> None:
        tensors.pop(f"{MODULE}.{name}", None)
        tensors.update({} if tensor is None else {f"{MODULE}.{name}": tensor})

    return changed


def says(**changed: object) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    return lambda tensors, said: said.update(changed)


HOSTILE: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, Any]], None], type[PrecisionctlError], str]] = {
    "no scales": (put("scales", None), DamagedCheckpoint, "no .*up_proj.scales for its codes"),
    "no biases": (put("qbiases", None), DamagedCheckpoint, "no .*up_proj.qbiases for its codes"),
    "no codes": (put("weight", None), DamagedCheckpoint, "no .*up_proj.weight for its codes"),
    "codes of values": (put("weight", torch.ones(256, 128)), DamagedCheckpoint, "weight is float32"),
    "flat codes": (put("weight", torch.ones(256).to(torch.uint32)), DamagedCheckpoint, "no codes of 4 bits"),
    "codes of nothing": (put("weight", torch.ones(0, 16).to(torch.uint32)), DamagedCheckpoint, "no codes of 4 bits"),
    "biases of another dtype": (put("qbiases", torch.ones(256, 2)), DamagedCheckpoint, "qbiases is float32"),
    "scales of integers": (put("scales", torch.ones(256, 2).int()), DamagedCheckpoint, "scales in int32"),
    "scales of other groups": (put("scales", torch.ones(256, 4).bfloat16()), DamagedCheckpoint, "scales is bfloat16"),
    "a bias of NaN": (put("qbiases", torch.full((256, 2), torch.nan).bfloat16()), DamagedCheckpoint, "infinite or NaN"),
    "three bits": (says(bits=3), PrecisionError, "codes of 3 bits"),
    "true bits": (says(bits=True), PrecisionError, "codes of True bits"),
    "groups of nothing": (says(group_size=0), PrecisionError, "in groups of 0"),
    "groups of a name": (says(group_size="64"), PrecisionError, "in groups of '64'"),
    "other groups": (says(group_size=96), DamagedCheckpoint, "no codes of 4 bits in groups of 96"),
    "other bits": (says(bits=8), DamagedCheckpoint, "scales is bfloat16 of shape"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    directory = tmp_path_factory.mktemp("metal")
    return directory, make(directory, *SPELLINGS[0])


@pytest.mark.parametrize("case", HOSTILE)
def test_what_contradicts_itself_or_is_not_read_is_one_error(
    tmp_path: Path, made: tuple[Path, dict[str, Tensor]], case: str
) -> None:
    changed, error, match = HOSTILE[case]
    tensors, config = load_file(made[0] / "model.safetensors"), json.loads((made[0] / "config.json").read_text())
    changed(tensors, config["quantization_config"])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=match):
        read_tensor(open_checkpoint(tmp_path), UP)
