"""torchao: FP8 and integers in safetensors with metadata, decoded to BF16 by every command."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conversions
import pytest
import repository
import torch
import torchao_directories
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from precisionctl.checkpoints.chunks import read_rows, read_tensor
from precisionctl.checkpoints.decoded.torchao_codes import TorchaoCodes
from precisionctl.checkpoints.hf_directory.fused_experts import sliced
from precisionctl.checkpoints.hf_directory.safetensors_file import StoredTensors, read_header
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.request import Request
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError, PrecisionError
from precisionctl.param import Parallelism
from precisionctl.reports.inspect import describe
from precisionctl.untrusted.safe_files import LENGTHS
from precisionctl.verify.compare import compare

UP = "model.layers.0.mlp.up_proj"
GOLDEN = repository.GOLDEN / "torchao_codes.safetensors"
WORDS = {"float8": "FP8 codes", "int8": "INT8 codes", "intx": "integers in INT8", "int4": "INT4 codes"}


def change(directory: Path, changed: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> None:
    """Change the tensors, and what the metadata says of each weight."""
    file = directory / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        said = {name: json.loads(text) for name, text in opened.metadata().items() if text[:1] in "[{"}
    tensors = load_file(file)
    changed(tensors, said)
    save_file(tensors, file, {name: each if isinstance(each, str) else json.dumps(each) for name, each in said.items()})


@pytest.mark.parametrize("spelling", torchao_directories.SPELLINGS)
def test_values_are_those_of_a_slow_reader_in_bf16_and_through_megatron(tmp_path: Path, spelling: str) -> None:
    values = torchao_directories.make(tmp_path / "source", spelling)
    notes = conversions.run(tmp_path / "source", tmp_path / "bf16", "hf", workers=1, verify=True).notes
    assert any(note.startswith("7 weights were ") and "no way back" in note for note in notes)
    found = load_file(tmp_path / "bf16" / "model.safetensors")
    assert len(values) == 7 and {name.rpartition(".")[2] for name in found} == {"weight"}
    for name, expected in values.items():
        assert torch.equal(found[name], expected), name
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    source = open_checkpoint(tmp_path / "source")
    assert compare(source, open_checkpoint(tmp_path / "bf16")).equal
    words = WORDS[spelling.partition("-")[0]]
    assert describe(source)["precision"] == f"{words} of torchao, read as bfloat16"
    if spelling in ("float8-block", "int4-group"):
        conversions.run(tmp_path / "source", tmp_path / "megatron", "megatron", parallelism=Parallelism(2), workers=1)
        assert compare(source, open_checkpoint(tmp_path / "megatron")).equal


def golden() -> TorchaoCodes:
    places = {name: (GOLDEN, tensor) for name, tensor in sliced(read_header(GOLDEN), GOLDEN).items()}
    return TorchaoCodes(StoredTensors(places), {"quantization_config": {"quant_method": "torchao"}}, GOLDEN)


CASES = sorted(name.removesuffix(".decoded") for name in load_file(GOLDEN) if name.endswith(".decoded"))


@pytest.mark.parametrize("case", [case for case in CASES if case != "mlp.experts"])
def test_what_torchao_has_coded_is_what_it_makes_of_it(case: str) -> None:
    assert torch.equal(read_tensor(golden(), f"{case}.weight"), load_file(GOLDEN)[f"{case}.decoded"].bfloat16())


def test_experts_in_one_tensor_are_read_as_its_slices() -> None:
    expected = load_file(GOLDEN)["mlp.experts.decoded"]
    for expert in range(2):
        assert torch.equal(read_tensor(golden(), f"mlp.experts.up_proj[{expert}]"), expected[expert])


def test_an_int4_tensor_decodes_to_the_weight_that_was_quantized_but_for_half_a_step() -> None:
    """torchao decodes it only within CUDA kernels. BF16 scales, zero points and results add a little."""
    stored = load_file(GOLDEN)
    step = stored["int4-group._weight_scale"].float().t().repeat_interleave(32, 1)
    found = read_tensor(golden(), "int4-group.weight").float()
    assert ((found - stored["int4-group.weight_before"].float()).abs() / step).max() < 0.55


def test_there_is_a_golden_weight_of_each_class_block_and_dtype() -> None:
    eight = {"float8-row", "float8-tensor", "float8-block", "float8-e5m2-float16", "float8-float32"}
    integers = {"int8-row", "int8-group-asymmetric", "intx-group", "intx-asymmetric-float16"}
    assert {*CASES} == eight | integers | {"mlp.experts"}


@pytest.mark.parametrize("spelling", ["float8-block", "intx-group", "int4-group"])
def test_how_rows_are_cut_does_not_matter(tmp_path: Path, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"moe_intermediate_size": 96, "num_hidden_layers": 2}
    values = torchao_directories.make(tmp_path, spelling, "qwen3-moe", **sizes)
    monkeypatch.setattr("precisionctl.checkpoints.decoded.base.PIECE", 300)
    reader = open_checkpoint(tmp_path)
    name = next(name for name in values if ".experts.1.down_proj" in name)
    assert torch.equal(read_tensor(reader, name), values[name])
    for row, rows in ((0, 1), (31, 2), (33, 64), (127, 1)):
        assert torch.equal(read_rows(reader, name, row, rows), values[name][row : row + rows])


def test_headers_alone_say_what_the_whole_says(tmp_path: Path) -> None:
    torchao_directories.make(tmp_path, "int8-row")
    whole = describe(open_checkpoint(tmp_path))
    file = tmp_path / "model.safetensors"
    (tmp_path / LENGTHS).write_text(json.dumps({file.name: file.stat().st_size}))
    os.truncate(file, min(tensor.offset for tensor in read_header(file).values()))
    assert describe(open_checkpoint(tmp_path)) == whole


Changed = Callable[[dict[str, Tensor], dict[str, Any]], object]


def put(name: str, tensor: Tensor | None) -> Changed:
    """Another tensor in the place of one, or none."""

    def changed(tensors: dict[str, Tensor], said: dict[str, Any]) -> None:
        tensors.pop(f"{UP}.{name}", None)
        tensors.update({} if tensor is None else {f"{UP}.{name}": tensor})

    return changed


def say(**keys: object) -> Changed:
    """Other metadata of the weight."""
    return lambda tensors, said: said[f"{UP}.weight"].update(keys)


def say_data(**keys: object) -> Changed:
    return lambda tensors, said: said[f"{UP}.weight"]["_data"].update(keys)


FLOATS = torch.zeros(96, 4)
NAN = torch.full((96, 1), torch.nan)
HOSTILE: dict[str, tuple[str, Changed, type[PrecisionctlError], str]] = {
    "no metadata": ("float8-row", lambda tensors, said: said.clear(), DamagedCheckpoint, "no metadata of its file"),
    "a class of another packing": (
        "float8-row",
        say(_type="Int4TilePackedTo4dTensor"),
        PrecisionError,
        "torchao's 'Int4TilePackedTo4dTensor'",
    ),
    "a class that is a list": ("float8-row", say(_type=["Float8Tensor"]), PrecisionError, "which is not read"),
    "another class": ("float8-row", say(_type="Int8Tensor"), DamagedCheckpoint, "which are no INT8 codes"),
    "inputs scaled": (
        "int8-row",
        say(_tensor_data_names=["qdata", "scale", "act_pre_scale"]),
        PrecisionError,
        "with 'act_pre_scale'",
    ),
    "tensors of no name": ("float8-row", say(_tensor_data_names=[["qdata"]]), DamagedCheckpoint, "makes no sense"),
    "no data": ("float8-row", say(_data=7), DamagedCheckpoint, "makes no sense"),
    "an object in an object": ("float8-row", say_data(dtype={}), DamagedCheckpoint, "makes no sense"),
    "a dtype that is none": ("float8-row", say_data(dtype={"_data": "int8"}), DamagedCheckpoint, "dtype int8"),
    "blocks of nothing": ("float8-row", say_data(block_size=[1, 0]), DamagedCheckpoint, "block_size"),
    "blocks below zero": ("float8-row", say_data(block_size=[1, -128]), DamagedCheckpoint, "as sizes"),
    "huge blocks": ("float8-row", say_data(block_size=[1, 1 << 62]), DamagedCheckpoint, "which are no FP8 codes"),
    "blocks of three": ("float8-row", say_data(block_size=[1, 1, 128]), DamagedCheckpoint, "which are no FP8 codes"),
    "blocks that do not divide": ("float8-row", say_data(block_size=[1, 100]), DamagedCheckpoint, "no FP8 codes"),
    "one block": ("float8-row", say_data(block_size=[]), DamagedCheckpoint, "which are no FP8 codes"),
    "no codes": ("float8-row", put("_weight_qdata", None), DamagedCheckpoint, "no .*_weight_qdata for its codes"),
    "no scales": ("float8-row", put("_weight_scale", None), DamagedCheckpoint, "no .*_weight_scale for its codes"),
    "a scale less": ("float8-row", put("_weight_scale", torch.ones(95, 1)), DamagedCheckpoint, "no FP8 codes"),
    "scales of integers": ("float8-row", put("_weight_scale", NAN.int()), DamagedCheckpoint, "no FP8 codes"),
    "scales of NaN": ("float8-row", put("_weight_scale", NAN), DamagedCheckpoint, "infinite or NaN"),
    "codes of BF16": ("float8-row", put("_weight_qdata", torch.ones(96, 128)), DamagedCheckpoint, "no FP8 codes"),
    "zero points of floats": (
        "intx-group",
        put("_weight_zero_point", FLOATS),
        PrecisionError,
        "zero points in float32",
    ),
    "zero points of words": ("intx-group", put("_weight_zero_point", FLOATS.int()), DamagedCheckpoint, "no integers"),
    "zero points of integers": ("int4-group", put("_weight_zero_point", FLOATS.int()), DamagedCheckpoint, "no INT4"),
    "no zero points": ("int4-group", put("_weight_zero_point", None), DamagedCheckpoint, "no .*_weight_zero_point"),
    "rows of scales": ("int4-group", put("_weight_scale", FLOATS.bfloat16()), DamagedCheckpoint, "no INT4 codes"),
    "another shape": ("int4-group", say_data(shape=[128, 96]), DamagedCheckpoint, "no INT4 codes"),
    "no shape": ("int4-group", say_data(shape=None), DamagedCheckpoint, "makes no sense"),
    "blocks of rows": ("int4-group", say_data(block_size=[2, 32]), DamagedCheckpoint, "no INT4 codes"),
    "values too": ("float8-row", put("weight", torch.ones(96, 128)), DamagedCheckpoint, "as values, and as codes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_tensors_and_metadata_that_contradict_one_another_are_one_error(tmp_path: Path, case: str) -> None:
    spelling, changed, error, match = HOSTILE[case]
    torchao_directories.make(tmp_path, spelling)
    change(tmp_path, changed)
    with pytest.raises(error, match=match):
        read_tensor(open_checkpoint(tmp_path), f"{UP}.weight")


def test_a_pickle_has_no_metadata_and_is_refused_by_name(tmp_path: Path) -> None:
    torchao_directories.make(tmp_path, "float8-row")
    torch.save({"lone": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(PrecisionError, match="torchao in pickles"):
        open_checkpoint(tmp_path)


def test_files_that_say_different_things_of_a_weight_are_refused(tmp_path: Path) -> None:
    torchao_directories.make(tmp_path, "float8-row")
    names = {name: "model.safetensors" for name in load_file(tmp_path / "model.safetensors")} | {
        "lone": "b.safetensors"
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    save_file({"lone": torch.ones(1)}, tmp_path / "b.safetensors", {f"{UP}.weight": "{}"})
    with pytest.raises(DamagedCheckpoint, match="different things"):
        open_checkpoint(tmp_path)


def test_exports_are_those_of_the_decoded_values(tmp_path: Path) -> None:
    torchao_directories.make(tmp_path / "torchao", "float8-row")
    conversions.run(tmp_path / "torchao", tmp_path / "bf16", "hf")
    for source in ("torchao", "bf16"):
        conversions.carry_out(Request.export(tmp_path / source, tmp_path / f"{source}-fp8", "vllm", "dynamic"))
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "torchao-fp8" / name).read_bytes() == (tmp_path / "bf16-fp8" / name).read_bytes()
