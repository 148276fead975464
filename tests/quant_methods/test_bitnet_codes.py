"""BitNet: weights of -1, 0 and 1, decoded to BF16 by every command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitnet_directories
import conversions
import pytest
import torch
from read_as_values import assert_read_as_values
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitNetConfig

from precisionctl.checkpoints.chunks import read_rows, read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError, PrecisionError

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("spelling", bitnet_directories.SPELLINGS)
def test_values_are_those_that_transformers_computes_with(tmp_path: Path, spelling: str) -> None:
    values = bitnet_directories.make(tmp_path / "source", spelling)
    words = "ternary codes of bitnet, read as bfloat16"
    _, found = assert_read_as_values(tmp_path / "source", values, words, megatron=spelling == "bitlinear")
    assert len(values) == 7 and not any(name.endswith("scale") for name in found)


def test_microsofts_own_family_converts_without_a_table(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 80}
    config = BitNetConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    source = tmp_path / "source"
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(source)
    tensors, values = load_file(source / "model.safetensors"), dict[str, Tensor]()
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        shape = tuple(tensors.pop(name).shape)
        coded, values[name] = bitnet_directories.coded(name, shape, "autobitlinear", torch.Generator().manual_seed(1))
        tensors |= coded
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    said = json.loads((source / "config.json").read_text())
    said["quantization_config"] = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    (source / "config.json").write_text(json.dumps(said))
    conversions.run(source, tmp_path / "bf16", "hf", verify=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16).state_dict()
    assert len(values) == 7 and all(torch.equal(model[name], each) for name, each in values.items())


@pytest.mark.parametrize("spelling", ["bitlinear", "autobitlinear-saved-again"])
def test_how_rows_are_cut_does_not_matter(tmp_path: Path, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rows are in several quarters of the bytes."""
    values = bitnet_directories.make(tmp_path, spelling)
    monkeypatch.setattr("precisionctl.checkpoints.decoded.base.PIECE", 300)
    reader = open_checkpoint(tmp_path)
    assert torch.equal(read_tensor(reader, UP), values[UP])
    monkeypatch.undo()
    for row, rows in ((0, 96), (0, 1), (23, 2), (10, 80), (95, 1)):
        assert torch.equal(read_rows(reader, UP, row, rows), values[UP][row : row + rows])


def put(name: str, tensor: Tensor | None) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    """Another tensor in the place of one, or none."""

    def changed(tensors: dict[str, Tensor], said: dict[str, Any]) -> None:
        tensors.pop(name, None)
        tensors.update({} if tensor is None else {name: tensor})

    return changed


def says(**changed: object) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    return lambda tensors, said: said.update(changed)


SCALE = f"{UP}_scale"
HOSTILE: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, Any]], None], type[PrecisionctlError], str]] = {
    "no scale": (put(SCALE, None), DamagedCheckpoint, "no .*weight_scale for its codes"),
    "no codes": (put(UP, None), DamagedCheckpoint, "no .*up_proj.weight for its codes"),
    "a scale of rows": (put(SCALE, torch.ones(96)), DamagedCheckpoint, r"not .* of \(1,\)"),
    "a scale of integers": (put(SCALE, torch.ones(1).int()), DamagedCheckpoint, "weight_scale is int32"),
    "a scale of NaN": (put(SCALE, torch.full((1,), torch.nan)), DamagedCheckpoint, "infinite or NaN"),
    "an infinite divisor": (put(SCALE, torch.ones(1) / 0), DamagedCheckpoint, "weight_scale holds a"),
    "a negative divisor": (put(SCALE, -torch.ones(1)), DamagedCheckpoint, r"weight_scale holds a .*safetensors\)"),
    "a scale of zero": (put(SCALE, torch.zeros(1)), DamagedCheckpoint, "infinite or NaN"),
    "codes in INT8": (put(UP, torch.ones(24, 128, dtype=torch.int8)), DamagedCheckpoint, "no codes of two bits"),
    "values under a divisor": (put(UP, torch.ones(96, 128)), DamagedCheckpoint, "no codes of two bits"),
    "flat codes": (put(UP, torch.ones(96, dtype=torch.uint8)), DamagedCheckpoint, "no codes of two bits"),
    "codes of nothing": (put(UP, torch.ones(0, 128, dtype=torch.uint8)), DamagedCheckpoint, "no codes of two bits"),
    "another class": (says(linear_class="trilinear"), PrecisionError, "`linear_class` 'trilinear'"),
    "a list of classes": (says(linear_class=["bitlinear"]), PrecisionError, r"`linear_class` \['bitlinear'\]"),
    "another mode": (says(quantization_mode=["offline"]), PrecisionError, r"`quantization_mode` \['offline'\]"),
    "weights to train": (
        says(linear_class="autobitlinear", quantization_mode="online"),
        PrecisionError,
        "computes -1, 0 and 1 anew.*Start from the packed release",
    ),
    "norms": (says(use_rms_norm=True), PrecisionError, "use_rms_norm"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bitnet")
    bitnet_directories.make(directory, "bitlinear")
    return directory


def test_bare_numbers_of_a_linear_that_nobody_left_out_are_damage(tmp_path: Path) -> None:
    """What transformers has saved again is -1, 0 and 1 beside a scale. Without the scale they look like values."""
    bitnet_directories.make(tmp_path, "autobitlinear-saved-again")
    tensors, path = load_file(tmp_path / "model.safetensors"), tmp_path / "config.json"
    del tensors[SCALE]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DamagedCheckpoint, match="no .*up_proj.weight_scale for its codes"):
        open_checkpoint(tmp_path)
    config = json.loads(path.read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", "mlp.up_proj"]
    path.write_text(json.dumps(config))
    assert torch.equal(read_tensor(open_checkpoint(tmp_path), UP), tensors[UP])


@pytest.mark.parametrize("case", HOSTILE)
def test_what_contradicts_itself_or_is_not_read_is_one_error(tmp_path: Path, made: Path, case: str) -> None:
    changed, error, match = HOSTILE[case]
    tensors, config = load_file(made / "model.safetensors"), json.loads((made / "config.json").read_text())
    changed(tensors, config["quantization_config"])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=match):
        read_tensor(open_checkpoint(tmp_path), UP)
