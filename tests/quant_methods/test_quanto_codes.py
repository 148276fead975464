"""optimum-quanto: INT8, FP8 and integers in groups, decoded to BF16 by every command."""

import json
from collections.abc import Callable
from pathlib import Path

import pico
import pytest
import repository
import torch
from read_as_values import assert_read_as_values
from safetensors.torch import load_file, save_file
from torch import Tensor

from precisionctl.checkpoints.chunks import read_rows, read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError, PrecisionError

GOLDEN = repository.GOLDEN / "quanto_codes.safetensors"
MAP = "quanto_qmap.json"
LAYER = "model.layers.0"
UP, GATE, Q = (f"{LAYER}.{name}.weight" for name in ("mlp.up_proj", "mlp.gate_proj", "self_attn.q_proj"))


def make(directory: Path, activations: str = "none") -> dict[str, Tensor]:
    """A small model with the golden weights, as quanto saves it. Returns what it decodes them to."""
    pico.save(directory, dtype=torch.bfloat16, num_hidden_layers=1)
    file, golden = directory / "model.safetensors", load_file(GOLDEN)
    values = {f"{name[:-8]}.weight": tensor for name, tensor in golden.items() if name.endswith(".decoded")}
    stored = {name: tensor for name, tensor in load_file(file).items() if name not in values}
    stored |= {name: tensor for name, tensor in golden.items() if ".weight._" in name}
    modules = [name.removesuffix(".weight") for name in values]
    stored |= {f"{module}.{kind}_scale": torch.tensor(1.0) for module in modules for kind in ("input", "output")}
    save_file(stored, file, metadata={"format": "pt"})
    said = {module: {"weights": "qint8", "activations": activations} for module in modules}
    (directory / MAP).write_text(json.dumps(said))
    return values


def test_what_quanto_has_coded_is_what_it_makes_of_it(tmp_path: Path) -> None:
    """Of INT8 and FP8, of integers in groups and in rows, with shifts that are integers and that are not."""
    values = make(tmp_path / "source")
    words = "2-bit integers and 4-bit integers and FP8 codes and INT8 codes of quanto, read as bfloat16"
    notes, found = assert_read_as_values(tmp_path / "source", values, words, megatron=True)
    assert not any("stay behind" in note for note in notes)
    assert len(values) == 7 and {name.rpartition(".")[2] for name in found} == {"weight"}
    assert not (tmp_path / "bf16" / MAP).exists()


def test_scales_of_inputs_that_are_quantized_stay_behind_with_a_note(tmp_path: Path) -> None:
    make(tmp_path, activations="qint8")
    assert any(note.startswith("14 scales of inputs") for note in open_checkpoint(tmp_path).notes())


def test_a_config_may_name_the_method_too(tmp_path: Path) -> None:
    """As transformers' QuantoConfig does, without a map."""
    values = make(tmp_path)
    (tmp_path / MAP).unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    said = {"quantization_config": {"quant_method": "quanto", "weights": "int4"}}
    (tmp_path / "config.json").write_text(json.dumps(config | said))
    assert torch.equal(read_tensor(open_checkpoint(tmp_path), GATE), values[GATE])


def test_without_a_table_nothing_says_the_shape_of_codes_in_groups(tmp_path: Path) -> None:
    values = make(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "of nobody"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PrecisionError, match="no table here says what shape it has"):
        open_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: each for name, each in tensors.items() if ".mlp." not in name}, tmp_path / "model.safetensors")
    assert torch.equal(read_tensor(open_checkpoint(tmp_path), Q), values[Q])


def test_how_rows_are_cut_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = make(tmp_path)
    monkeypatch.setattr("precisionctl.checkpoints.decoded.base.PIECE", 300)
    reader = open_checkpoint(tmp_path)
    for name, expected in values.items():
        assert torch.equal(read_tensor(reader, name), expected.bfloat16())
        assert torch.equal(read_rows(reader, name, 7, 23), expected[7:30].bfloat16())


def put(name: str, tensor: Tensor | None) -> Callable[[dict[str, Tensor]], None]:
    """Another tensor in the place of one, or none."""

    def changed(tensors: dict[str, Tensor]) -> None:
        tensors.pop(name, None)
        tensors.update({} if tensor is None else {name: tensor})

    return changed


HOSTILE: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "no scale": (put(f"{UP}._scale", None), "no .*up_proj.weight._scale for its codes"),
    "no shift": (put(f"{UP}._shift", None), "no .*up_proj.weight._shift for its codes"),
    "no codes": (put(f"{UP}._data._data", None), "no .*up_proj.weight._data for its codes"),
    "another number of groups": (put(f"{UP}._scale", torch.ones(96, 1)), r"has 3,072 codes|beside 96 scales|_shift is"),
    "no groups": (put(f"{UP}._scale", torch.ones(0, 1)), "beside 0 scales"),
    "a flat scale": (put(f"{UP}._scale", torch.ones(192)), "_scale is float32 of shape"),
    "a scale of integers": (put(f"{UP}._scale", torch.ones(192, 1).int()), "_scale is int32"),
    "shifts of another dtype": (put(f"{UP}._shift", torch.ones(192, 1).double()), "_shift is float64"),
    "codes in INT8": (put(f"{UP}._data._data", torch.zeros(48, 32, dtype=torch.int8)), "_data is int8"),
    "wider codes": (put(f"{UP}._data._data", torch.zeros(48, 64).byte()), "has 12,288 codes, the model's sizes say"),
    "flat codes": (put(f"{Q}._data", torch.zeros(64, dtype=torch.int8)), "no codes of 8 bits"),
    "codes in FP32": (put(f"{Q}._data", torch.zeros(64, 64)), "no codes of 8 bits"),
    "a scale of a tensor": (put(f"{Q}._scale", torch.ones(())), "_scale is float32 of shape"),
    "a scale of NaN": (put(f"{Q}._scale", torch.full((64, 1), torch.nan)), "infinite or NaN"),
    "a weight as values too": (put(Q, torch.ones(64, 64)), "as values, and as codes"),
    "a weight as values in the place of codes of 8 bits": (
        put(f"{UP}._data", torch.ones(96, 64)),
        "and as codes in groups",
    ),
    "a stray": (put(f"{LAYER}.mlp.weight._scale", torch.ones(2, 1)), "no .*mlp.weight._data for its codes"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quanto")
    make(directory)
    return directory


@pytest.mark.parametrize("case", HOSTILE)
def test_tensors_that_contradict_one_another_are_one_error(tmp_path: Path, made: Path, case: str) -> None:
    changed, match = HOSTILE[case]
    tensors = load_file(made / "model.safetensors")
    changed(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((made / "config.json").read_bytes())
    with pytest.raises(DamagedCheckpoint, match=match):
        reader = open_checkpoint(tmp_path)
        for name in (UP, Q):
            read_tensor(reader, name)


@pytest.mark.parametrize("said", ["[]", "{", '{"a": 1}', '{"model.layers.0.mlp.up_proj": []}'])
def test_a_map_that_makes_no_sense_is_one_error_or_none(tmp_path: Path, said: str) -> None:
    make(tmp_path)
    (tmp_path / MAP).write_text(said)
    try:
        open_checkpoint(tmp_path)
    except PrecisionctlError as error:
        assert MAP in str(error)
