"""GPTQ and AWQ: another packing of INT4 and INT8, decoded to BF16 by every command."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import conversions
import pytest
import repository
import torch
import transposed_directories
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPTQConfig

from precisionctl.checkpoints.chunks import Chunked, read_rows, read_tensor
from precisionctl.checkpoints.decoded import transposed_codes
from precisionctl.checkpoints.decoded.base import DecodedWeights
from precisionctl.checkpoints.decoded.methods import decoded_weights
from precisionctl.checkpoints.hf_directory.huggingface_files import SAFETENSORS, places_in, read_stored
from precisionctl.checkpoints.hf_directory.safetensors_file import StoredTensors, read_header
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.request import Request
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError, PrecisionError, UnmappedTensor
from precisionctl.param import Parallelism
from precisionctl.reports.inspect import describe
from precisionctl.untrusted.safe_files import LENGTHS
from precisionctl.verify.compare import compare

EACH = pytest.mark.parametrize("spelling", transposed_directories.SPELLINGS)
UP = "model.layers.0.mlp.up_proj"


def stored(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def change(directory: Path, name: str, changed: Callable[[Tensor], Tensor | None]) -> None:
    tensors = stored(directory)
    found = changed(tensors.pop(name).clone())
    tensors |= {} if found is None else {name: found.contiguous()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def say(directory: Path, **said: object) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= said
    path.write_text(json.dumps(config))


@EACH
def test_values_are_those_of_a_slow_reader_in_bf16_and_through_megatron(tmp_path: Path, spelling: str) -> None:
    values = transposed_directories.make(tmp_path / "source", spelling)
    notes = conversions.run(tmp_path / "source", tmp_path / "bf16", "hf", workers=1, verify=True).notes
    assert any(note.startswith("7 weights were ") and "no way back" in note for note in notes)
    found = stored(tmp_path / "bf16")
    assert len(values) == 7 and not [name for name in found if name.endswith(("qweight", "qzeros", "scales", "g_idx"))]
    for name, expected in values.items():
        assert torch.equal(found[name], expected.float().bfloat16()), name
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    source = open_checkpoint(tmp_path / "source")
    assert compare(source, open_checkpoint(tmp_path / "bf16")).equal
    bits = transposed_directories.SPELLINGS[spelling].bits
    method = transposed_directories.SPELLINGS[spelling].config["quant_method"]
    assert describe(source)["precision"] == f"{bits}-bit integers of {method}, read as bfloat16"
    if spelling == "gptq-desc-act":
        conversions.run(tmp_path / "source", tmp_path / "megatron", "megatron", parallelism=Parallelism(2), workers=1)
        assert compare(source, open_checkpoint(tmp_path / "megatron")).equal


@pytest.mark.parametrize("spelling", ["gptq-8-desc-act", "awq"])
def test_how_rows_are_cut_does_not_matter(tmp_path: Path, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the experts of a mixture, too; with little room, in runs of 32 rows."""
    values = transposed_directories.make(tmp_path, spelling, "qwen3-moe", moe_intermediate_size=96, num_hidden_layers=2)
    monkeypatch.setattr(transposed_codes, "_ROOM", 1)
    reader = open_checkpoint(tmp_path)
    name = next(name for name in values if ".experts.1.down_proj" in name)
    expected = values[name].float().bfloat16()
    assert torch.equal(read_tensor(reader, name), expected)
    for row, rows in ((0, 1), (31, 2), (33, 64), (127, 1)):
        assert torch.equal(read_rows(reader, name, row, rows), expected[row : row + rows])


@pytest.mark.parametrize("kind", ["qweight", "qzeros", "scales", "g_idx"])
def test_verify_finds_a_bit_that_has_flipped_anywhere(tmp_path: Path, kind: str) -> None:
    transposed_directories.make(tmp_path / "source", "gptq-v2")
    conversions.run(tmp_path / "source", tmp_path / "bf16", "hf", workers=1)

    def flip(tensor: Tensor) -> Tensor:
        tensor.view(torch.uint8).view(-1)[tensor.element_size() * 5] ^= 1
        return tensor

    change(tmp_path / "source", f"{UP}.{kind}", flip)
    found = compare(open_checkpoint(tmp_path / "source"), open_checkpoint(tmp_path / "bf16"))
    assert not found.equal and [each.name for each in found.tensors if not each.equal] == [f"{UP}.weight"]


def as_int64(tensor: Tensor) -> Tensor:
    return tensor.long()


def all_ones(tensor: Tensor) -> Tensor:
    return tensor.fill_(-1)


HOSTILE: dict[str, tuple[str, Callable[[Tensor], Tensor | None], type[PrecisionctlError], str]] = {
    "no zero points": ("qzeros", lambda _: None, DamagedCheckpoint, "no .*up_proj.qzeros"),
    "no scales": ("scales", lambda _: None, DamagedCheckpoint, "no .*up_proj.scales"),
    "words of another dtype": ("qweight", as_int64, DamagedCheckpoint, "up_proj.qweight is int64"),
    "one dimension": ("scales", lambda each: each.view(-1), DamagedCheckpoint, "up_proj.scales is float16 of shape"),
    "a row less": ("qweight", lambda each: each[1:], DamagedCheckpoint, "no codes of 2, 4 or 8 bits"),
    "an output less": ("scales", lambda each: each[:, 1:], DamagedCheckpoint, "no codes of 2, 4 or 8 bits"),
    "a group less": ("scales", lambda each: each[1:], DamagedCheckpoint, "no codes of 2, 4 or 8 bits"),
    "two bits": ("qzeros", lambda each: each[:, : each.shape[1] // 2], DamagedCheckpoint, "no codes of 2, 4 or 8 bits"),
    "an input less": ("g_idx", lambda each: each[:-9], DamagedCheckpoint, "no codes of 2, 4 or 8 bits"),
    "a group that is none": (
        "g_idx",
        lambda each: each + 1,
        DamagedCheckpoint,
        "g_idx names groups that are none of 4",
    ),
    "an infinite scale": ("scales", lambda each: each / 0, DamagedCheckpoint, "infinite or NaN"),
    "a scale that makes infinities": (
        "scales",
        lambda each: torch.full_like(each, 3e38, dtype=torch.float32),
        DamagedCheckpoint,
        "up_proj.weight` has values that are infinite or NaN, by its codes and .*scales",
    ),
    "no order, which others have": ("g_idx", lambda _: None, DamagedCheckpoint, "no .*up_proj.g_idx"),
    "zero points that readers disagree on": ("qzeros", all_ones, PrecisionError, "holds 15, for which readers"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_tensors_that_contradict_one_another_are_one_error(tmp_path: Path, case: str) -> None:
    kind, changed, error, match = HOSTILE[case]
    transposed_directories.make(tmp_path, "gptq")
    change(tmp_path, f"{UP}.{kind}", changed)
    with pytest.raises(error, match=match):
        read_tensor(open_checkpoint(tmp_path), f"{UP}.weight")


def test_an_order_of_no_inputs_is_refused_where_a_group_is_a_whole_row(tmp_path: Path) -> None:
    transposed_directories.make(tmp_path, "gptq")
    say(tmp_path, group_size=-1)
    first = UP.replace("up_proj", "down_proj")
    change(tmp_path, f"{first}.g_idx", lambda each: each[:0])
    with pytest.raises(DamagedCheckpoint, match="down_proj has .* no codes of 2, 4 or 8 bits"):
        open_checkpoint(tmp_path)


def test_scales_may_be_negative_as_autoround_makes_them(tmp_path: Path) -> None:
    values = transposed_directories.make(tmp_path, "auto-round-gptq")
    change(tmp_path, f"{UP}.scales", lambda each: -each)
    found = read_tensor(open_checkpoint(tmp_path), f"{UP}.weight")
    assert torch.equal(found, -values[f"{UP}.weight"].float().bfloat16())


def test_values_and_codes_of_one_weight_are_refused(tmp_path: Path) -> None:
    transposed_directories.make(tmp_path, "awq")
    tensors = stored(tmp_path)
    save_file(tensors | {f"{UP}.weight": torch.zeros(96, 128)}, tmp_path / "model.safetensors")
    with pytest.raises(DamagedCheckpoint, match="as values, and as codes"):
        open_checkpoint(tmp_path)


def of_one(
    directory: Path, spelling: str, shape: tuple[int, int], group: int = 0, **said: int
) -> tuple[DecodedWeights, Tensor]:
    """A weight of any shape alone, whose groups are whole rows or of so many inputs, and its values. The size of
    groups is `said`, or not."""
    spelled = replace(transposed_directories.SPELLINGS[spelling], group=group)
    tensors, values = transposed_directories.coded(shape, spelled, torch.Generator().manual_seed(1))
    save_file({f"x.{kind}": each.contiguous() for kind, each in tensors.items()}, directory / "model.safetensors")
    places = places_in(read_stored(directory, SAFETENSORS))
    config = {key: value for key, value in spelled.config.items() if key != "group_size"} | said
    found = decoded_weights({"quantization_config": config}, StoredTensors(places), directory)
    assert found
    return found, values.float().bfloat16()


@pytest.mark.parametrize("shape", [(16, 1), (24, 4), (5, 3), (40, 15), (64, 33)])
@pytest.mark.parametrize("spelling", ["gptq", "gptq-8", "gptq-desc-act", "auto-round-8-gptqmodel"])
def test_few_inputs_are_one_word_or_part_of_one(tmp_path: Path, spelling: str, shape: tuple[int, int]) -> None:
    decoded, values = of_one(tmp_path, spelling, shape, group_size=-1)
    assert torch.equal(decoded.rows("x.weight", 0, shape[0]), values)


@pytest.mark.parametrize("spelling", ["gptq-v2", "awq"])
def test_groups_are_of_128_where_nothing_is_said_as_in_transformers(tmp_path: Path, spelling: str) -> None:
    decoded, values = of_one(tmp_path, spelling, (16, 384), 128)
    assert torch.equal(decoded.rows("x.weight", 0, 16), values)


def test_inputs_of_awq_are_even(tmp_path: Path) -> None:
    decoded, values = of_one(tmp_path, "awq", (16, 6), group_size=-1)
    assert torch.equal(decoded.rows("x.weight", 0, 16), values)
    with pytest.raises(DamagedCheckpoint, match="no codes of 2, 4 or 8 bits"):
        of_one(tmp_path, "awq", (16, 7), group_size=-1)


def say_beside(directory: Path, name: str, said: dict[str, object]) -> None:
    """Nothing in config.json, and this in a file of its own."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    (directory / name).write_text(json.dumps(said))


AUTO_GPTQ = {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "sym": True, "true_sequential": True}
AUTO_AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
"""As AutoGPTQ (TheBloke's, of 2023) and AutoAWQ save them; the latter's words are those of its AwqConfig."""


@pytest.mark.parametrize(
    ("spelling", "file", "said"),
    [
        ("gptq", "quantize_config.json", AUTO_GPTQ),
        ("gptq-v2", "quantize_config.json", {**AUTO_GPTQ, "quant_method": "gptq", "checkpoint_format": "GPTQ_V2"}),
        ("awq", "quant_config.json", AUTO_AWQ),
        ("awq", "quantize_config.json", {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}),
    ],
)
def test_a_file_beside_config_json_that_alone_says_how_weights_are_coded_is_read(
    tmp_path: Path, spelling: str, file: str, said: dict[str, object]
) -> None:
    values = transposed_directories.make(tmp_path / "source", spelling)
    say_beside(tmp_path / "source", file, said)
    notes = conversions.run(tmp_path / "source", tmp_path / "bf16", "hf", workers=1, verify=True).notes
    assert not any(note.startswith("Left behind") for note in notes)
    found = stored(tmp_path / "bf16")
    assert all(torch.equal(found[name], expected.float().bfloat16()) for name, expected in values.items())
    assert not (tmp_path / "bf16" / file).exists()
    (tmp_path / "bf16" / file).write_text(json.dumps(said))  # beside values it says nothing
    assert describe(open_checkpoint(tmp_path / "bf16"))["precision"] == "bfloat16"


def test_of_two_files_that_say_how_weights_are_coded_none_is_chosen(tmp_path: Path) -> None:
    transposed_directories.make(tmp_path, "awq")
    say_beside(tmp_path, "quant_config.json", AUTO_AWQ)
    say = tmp_path / "quantize_config.json"
    say.write_text(json.dumps(AUTO_GPTQ))
    with pytest.raises(DamagedCheckpoint, match=r"quantize_config.json and quant_config.json both say"):
        open_checkpoint(tmp_path)


def test_config_json_counts_more_than_a_file_beside_it(tmp_path: Path) -> None:
    values = transposed_directories.make(tmp_path, "gptq-v2")
    (tmp_path / "quantize_config.json").write_text(json.dumps(AUTO_GPTQ))
    found = read_tensor(open_checkpoint(tmp_path), f"{UP}.weight")
    assert torch.equal(found, values[f"{UP}.weight"].float().bfloat16())


@pytest.mark.parametrize("words", [{"w_bit": 8}, {"q_group_size": 64}])
def test_autoawqs_own_words_are_held_against_the_tensors(tmp_path: Path, words: dict[str, int]) -> None:
    transposed_directories.make(tmp_path, "awq")
    say(tmp_path, **words)
    with pytest.raises(DamagedCheckpoint, match="codes of 4 bits, and config.json says|and groups of 64"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("spelling", "said"), [("gptq", {"checkpoint_format": "GPTQ"}), ("gptq-v2", {"checkpoint_format": "GPTQ_v2"})]
)
def test_capitals_in_the_format_of_zero_points_mean_the_same(
    tmp_path: Path, spelling: str, said: dict[str, object]
) -> None:
    """As to transformers' GPTQConfig."""
    values = transposed_directories.make(tmp_path, spelling)
    say(tmp_path, **said)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert GPTQConfig(**config).format == spelling.replace("-", "_")
    found = read_tensor(open_checkpoint(tmp_path), f"{UP}.weight")
    assert torch.equal(found, values[f"{UP}.weight"].float().bfloat16())


BIASES = [f"model.layers.0.self_attn.{part}_proj.bias" for part in "qko"]


@pytest.mark.parametrize("family", ["llama-3", "qwen2"])
def test_biases_of_zeros_that_the_model_does_not_have_stay_behind_and_are_told(tmp_path: Path, family: str) -> None:
    """As AutoGPTQ's directories have them. Those of q and k are Qwen2's own."""
    transposed_directories.make(tmp_path / "source", "gptq", family)
    zeros = {name: torch.zeros(64 if ".k_" in name else 128, dtype=torch.float16) for name in BIASES}
    save_file(stored(tmp_path / "source") | zeros, tmp_path / "source" / "model.safetensors")
    theirs = [] if family == "llama-3" else BIASES[:2]
    notes = conversions.run(tmp_path / "source", tmp_path / "bf16", "hf", workers=1, verify=True).notes
    assert [name for name in BIASES if name in stored(tmp_path / "bf16")] == theirs
    many = "1 bias of zeros" if theirs else "3 biases of zeros"
    assert any(note.startswith(many) and "self_attn." in note for note in notes)


def test_headers_alone_do_not_say_that_biases_are_zeros(tmp_path: Path) -> None:
    transposed_directories.make(tmp_path, "gptq")
    file = tmp_path / "model.safetensors"
    save_file(stored(tmp_path) | {BIASES[0]: torch.zeros(128)}, file)
    (tmp_path / LENGTHS).write_text(json.dumps({file.name: file.stat().st_size}))
    os.truncate(file, min(tensor.offset for tensor in read_header(file).values()))
    assert describe(open_checkpoint(tmp_path))["precision"] == "4-bit integers of gptq, read as bfloat16"


@pytest.mark.parametrize("bias", [torch.full((128,), 1e-7), torch.zeros(1, 128), torch.full((128,), math.nan)])
def test_another_bias_that_the_model_does_not_have_is_refused(tmp_path: Path, bias: Tensor) -> None:
    transposed_directories.make(tmp_path, "gptq")
    save_file(stored(tmp_path) | {BIASES[0]: bias}, tmp_path / "model.safetensors")
    with pytest.raises(UnmappedTensor, match="q_proj.bias"):
        conversions.run(tmp_path, tmp_path / "bf16", "hf", workers=1)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight"])
def test_fp8_beside_codes_has_scales_that_nothing_says_and_is_refused(tmp_path: Path, name: str) -> None:
    transposed_directories.make(tmp_path, "awq")
    change(tmp_path, name, lambda each: each.to(torch.float8_e4m3fn))
    with pytest.raises(PrecisionError, match=f"`{name}` is float8_e4m3fn: codes of a kind that cannot be read"):
        open_checkpoint(tmp_path)


def test_of_codes_that_are_not_read_the_first_in_the_file_is_named(tmp_path: Path) -> None:
    transposed_directories.make(tmp_path, "awq")
    dtypes = {"model.norm.weight": torch.float8_e4m3fn, "lm_head.weight": torch.uint8}
    for name, dtype in dtypes.items():
        change(tmp_path, name, lambda each, dtype=dtype: each.to(dtype))
    first, _ = sorted(dtypes, key=list(read_header(tmp_path / "model.safetensors")).index)
    assert dtypes[first] is torch.float8_e4m3fn
    with pytest.raises(PrecisionError, match=f"`{first}` is float8_e4m3fn: codes of a kind that cannot be read"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("spelling", "said", "match"),
    [
        ("gptq", {"checkpoint_format": "marlin"}, "the format 'marlin'"),
        ("gptq", {"is_marlin_format": True}, "the format 'marlin'"),
        ("gptq", {"checkpoint_format": ["gptq"]}, "which is not read"),
        ("awq", {"version": "gemv"}, "AWQ for 'gemv'"),
        ("awq", {"version": 1}, "which are not read"),
        ("awq", {"backend": "llm-awq"}, "AWQ for 'llm-awq'"),
        ("gptq", {"group_size": 0}, "0 as the size of a group"),
        ("awq", {"group_size": None}, "None as the size of a group"),
        ("gptq", {"checkpoint_format": False}, "the format False"),
        ("gptq", {"dynamic": {"+:.*up_proj": {"bits": 8}}}, "`dynamic`"),
        ("gptq", {"dynamic": 7}, "`dynamic`"),
        ("gptq", {"pack_dtype": "int16"}, "`pack_dtype` 'int16'"),
        ("gptq", {"desc_act": "no"}, "`desc_act` 'no'"),
        ("awq", {"zero_point": False}, "`zero_point` False"),
    ],
)
def test_other_orders_of_codes_are_refused_by_name(
    tmp_path: Path, spelling: str, said: dict[str, object], match: str
) -> None:
    transposed_directories.make(tmp_path, spelling)
    say(tmp_path, **said)
    with pytest.raises(PrecisionError, match=match):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("spelling", "said", "match"),
    [
        ("gptq", {"bits": 8}, "codes of 4 bits, and config.json says `bits` 8"),
        ("awq", {"bits": "4"}, "says `bits` '4'"),
        ("gptq", {"group_size": 10**30}, "no codes of 2, 4 or 8 bits"),
        ("gptq-rows", {"group_size": 1000}, "no codes of 2, 4 or 8 bits"),
        ("gptq-rows", {"desc_act": True}, "no .*g_idx for its codes"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_one_error(
    tmp_path: Path, spelling: str, said: dict[str, object], match: str
) -> None:
    transposed_directories.make(tmp_path, spelling)
    say(tmp_path, **said)
    with pytest.raises(DamagedCheckpoint, match=match):
        open_checkpoint(tmp_path)


def test_modules_that_are_not_coded_may_be_named(tmp_path: Path) -> None:
    transposed_directories.make(tmp_path, "gptq")
    say(tmp_path, dynamic={"-:.*lm_head": {}}, pack_dtype="int32")
    assert f"{UP}.weight" in open_checkpoint(tmp_path).specs


def test_the_order_of_inputs_is_read_once_for_each_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transposed_directories.make(tmp_path, "gptq-desc-act")
    monkeypatch.setattr(transposed_codes, "_ROOM", 1)  # three slabs of 32 rows
    names = list[str]()

    def read(stored: Chunked, name: str) -> Tensor:
        names.append(name)
        return read_tensor(stored, name)

    monkeypatch.setattr(transposed_codes, "read_tensor", read)
    reader = open_checkpoint(tmp_path)
    for row in range(96):
        read_rows(reader, f"{UP}.weight", row, 1)
    assert names == [f"{UP}.g_idx"]


FOLDER = repository.GOLDEN / "transposed"
GOLDEN = sorted(file.stem for file in FOLDER.iterdir())


@pytest.mark.parametrize("golden", GOLDEN)
def test_what_gptqmodel_autoawq_and_autoround_have_packed_is_what_they_make_of_it(golden: str) -> None:
    """In BF16; their scales were FP32, so that they had not rounded yet (tests/golden/transposed.py)."""
    file = FOLDER / f"{golden}.safetensors"
    with safe_open(file, framework="pt") as opened:
        config = {"quantization_config": json.loads(opened.metadata()["quantization_config"])}
    places = {f"module.{name}": (file, tensor) for name, tensor in read_header(file).items()}
    found = decoded_weights(config, StoredTensors(places), file)
    assert found and torch.equal(read_tensor(found, "module.weight"), load_file(file)["decoded"].t().bfloat16())


def test_there_is_a_golden_file_of_each_way_to_store_zero_points_and_groups() -> None:
    assert {*GOLDEN} == {
        "autoawq-gemm",
        *(
            "autoround-2-auto_round",
            "autoround-2-auto_gptq",
            "autoround-4-auto_round",
            "autoround-8-auto_round",
            "autoround-4-auto_gptq",
            "autoround-8-auto_gptq",
        ),
        *("autoround-4-auto_awq", "gptqmodel-4-gptq"),
        *("gptqmodel-4-gptq_v2-desc-act", "gptqmodel-8-gptq", "gptqmodel-8-gptq_v2-desc-act"),
    }


def test_gpt_2_whose_linears_are_transposed_themselves_is_refused_by_name(tmp_path: Path) -> None:
    transposed_directories.make(tmp_path / "hf", "gptq", "gpt2", hidden_size=64)
    with pytest.raises(PrecisionError, match="GPT-2"):
        open_checkpoint(tmp_path / "hf")


def test_exports_are_those_of_the_decoded_values(tmp_path: Path) -> None:
    transposed_directories.make(tmp_path / "awq", "awq")
    conversions.run(tmp_path / "awq", tmp_path / "bf16", "hf")
    for source in ("awq", "bf16"):
        conversions.carry_out(Request.export(tmp_path / source, tmp_path / f"{source}-fp8", "vllm", "dynamic"))
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "awq-fp8" / name).read_bytes() == (tmp_path / "bf16-fp8" / name).read_bytes()
