"""Hugging Face directories in FP8 as sources of every command: what their codes decode to, and where it goes."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import conversions
import fp8_directories
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from soaking import few, in_soak
from torch import Tensor

from precisionctl.checkpoints.chunks import Chunked, read_rows, read_tensor
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion import buffers, worker
from precisionctl.errors import DamagedCheckpoint, PrecisionError
from precisionctl.param import Parallelism
from precisionctl.verify.compare import compare

run = partial(conversions.run, workers=1, verify=True)

EACH = pytest.mark.parametrize("spelling", fp8_directories.SPELLINGS)
OF_EACH_BLOCK = {(said.block, said.dtype): name for name, said in fp8_directories.SPELLINGS.items()}.values()
"""A spelling of each size of block and dtype of scales: what a conversion knows of them, once they are read."""


def decoded(reader: HuggingFaceReader, name: str) -> torch.Tensor:
    codes = read_tensor(reader, name)
    return reader.encodings[name].decode_rows(codes, 0)


@EACH
def test_every_spelling_decodes_to_code_times_scale(tmp_path: Path, spelling: str) -> None:
    made = fp8_directories.make(tmp_path, spelling, **fp8_directories.RAGGED)
    reader = HuggingFaceReader(tmp_path)
    assert set(reader.encodings) == set(made) and len(made) == 14
    assert not any("scale" in name for name in reader.specs)
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        assert torch.equal(decoded(reader, name), made[name].values)


@pytest.mark.parametrize("rows, columns", [(576, 130), (192, 7), (128, 128), (1, 1), (129, 257)])
def test_ragged_edges_belong_to_the_last_scales(tmp_path: Path, rows: int, columns: int) -> None:
    """DeepSeek's kv_a_proj has 576 rows and 5 rows of scales; 192 rows have 2, of 128 and 64."""
    generator = torch.Generator().manual_seed(0)
    codes = fp8_directories.random_codes((rows, columns), generator, torch.float8_e4m3fn)
    grid = fp8_directories.random_scales((-(-rows // 128), -(-columns // 128)), generator, torch.float32)
    fp8_directories.make(tmp_path, "fp8-block")
    file, name = tmp_path / "model.safetensors", "model.layers.0.self_attn.q_proj.weight"
    stored = load_file(file) | {name: codes, f"{name}_scale_inv": grid}
    save_file(stored, file, metadata={"format": "pt"})
    reader = HuggingFaceReader(tmp_path)
    expected = torch.from_numpy(fp8_directories.decoded(codes, grid.numpy(), (128, 128)))
    assert torch.equal(decoded(reader, name), expected)
    for row, count in ((0, 1), (rows // 2, rows - rows // 2), (rows - 1, 1)):  # any run of rows, as a worker reads them
        part = reader.encodings[name].decode_rows(read_rows(reader, name, row, count), row)
        assert torch.equal(part, expected[row : row + count])


def test_transformers_gets_ragged_blocks_wrong_which_is_why_it_is_no_judge_of_them() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    theirs = Fp8Dequantize(None)
    generator = torch.Generator().manual_seed(0)
    grid = fp8_directories.random_scales((5, 1), generator, torch.float32)
    with pytest.raises(ValueError, match="not divisible"):
        theirs._dequantize_one(fp8_directories.random_codes((576, 128), generator, torch.float8_e4m3fn), grid)
    codes = fp8_directories.random_codes((192, 128), generator, torch.float8_e4m3fn)
    expected = fp8_directories.decoded(codes, grid[:2].numpy(), (128, 128))
    assert not np.array_equal(theirs._dequantize_one(codes, grid[:2], torch.float32).numpy(), expected)


@pytest.mark.parametrize("spelling", ["fp8-block", "fp8-ue8m0", "fp8-tensor-transformers", "modelopt-mxfp8", "mxfp8"])
def test_aligned_shapes_decode_as_transformers_decodes_them(tmp_path: Path, spelling: str) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    fp8_directories.make(tmp_path, spelling, hidden_size=256, intermediate_size=384)
    reader, stored = HuggingFaceReader(tmp_path), load_file(tmp_path / "model.safetensors")
    names = [name for name in reader.encodings if stored[name].shape[0] % 128 == 0]
    assert len(names) >= 5 * 2
    for name in names:
        scale = stored[f"{name}{'_scale' if 'modelopt' in spelling else '_scale_inv'}"]
        assert torch.equal(
            decoded(reader, name), Fp8Dequantize(None)._dequantize_one(stored[name], scale, torch.float32)
        )


@pytest.mark.parametrize("dtype", fp8_directories.LAYOUTS)
def test_every_code_of_every_format_is_worth_what_its_bits_say(dtype: torch.dtype) -> None:
    no_numbers = fp8_directories.LAYOUTS[dtype][3]
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    for code in range(256):
        if code not in no_numbers:
            assert values[code] == fp8_directories.value_of(code, dtype)
        elif dtype != torch.float8_e5m2 or code & 3:  # E5M2 has infinities
            assert values[code].isnan()


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_other_codes_than_e4m3_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    made = fp8_directories.make(tmp_path, "fp8-block", codes=dtype)
    reader = HuggingFaceReader(tmp_path)
    for name, weight in made.items():
        assert torch.equal(decoded(reader, name), weight.values)


@pytest.mark.parametrize("spelling", few(fp8_directories.SPELLINGS, *OF_EACH_BLOCK))
def test_a_conversion_gives_the_decoded_values_rounded_once_to_bf16(tmp_path: Path, spelling: str) -> None:
    made = fp8_directories.make(tmp_path / "fp8", spelling, **fp8_directories.RAGGED)
    run(tmp_path / "fp8", tmp_path / "hf", "hf")
    stored, config = (
        load_file(tmp_path / "hf" / "model.safetensors"),
        json.loads((tmp_path / "hf/config.json").read_text()),
    )
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert not any("scale" in name for name in stored)
    for name in ("model.layers.0.self_attn.v_proj.weight", "model.layers.1.mlp.gate_proj.weight"):
        assert torch.equal(stored[name], made[name].values.bfloat16())
    run(tmp_path / "fp8", tmp_path / "megatron", "megatron", parallelism=Parallelism(2), precision="bf16")
    assert compare(open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "megatron")).equal


@pytest.mark.parametrize("family", ["deepseek-v3", *in_soak("mixtral", "gpt2", "phi3")])
def test_other_families_decode_too(tmp_path: Path, family: str) -> None:
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64} if family == "deepseek-v3" else {}
    made = fp8_directories.make(tmp_path / "fp8", "fp8-block", family, **sizes)
    run(tmp_path / "fp8", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "hf", "hf")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert made.keys() <= stored.keys()
    if family == "deepseek-v3":
        assert made["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].grid.shape == (5, 1)
    for name, weight in made.items():
        assert torch.equal(stored[name], weight.values.bfloat16())


def test_pieces_of_fewer_rows_than_a_block_decode_as_the_whole_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fp8_directories.make(tmp_path / "fp8", "fp8-block", **fp8_directories.RAGGED)
    elements = []

    def read(source: Chunked, name: str, row: int, rows: int, out: torch.Tensor | None = None) -> torch.Tensor:
        elements.append(rows * source.specs[name].columns)
        return read_rows(source, name, row, rows, out)

    monkeypatch.setattr(buffers, "BUFFER", 4 * 192 * 7)
    monkeypatch.setattr(worker, "read_rows", read)
    run(tmp_path / "fp8", tmp_path / "hf", "hf")
    assert 192 * 6 < max(elements) <= 2 * 192 * 7, "two bytes each when the result is read back"
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    for name, weight in list(made.items())[:4]:
        assert torch.equal(stored[name], weight.values.bfloat16())


def test_a_scale_with_too_few_rows_is_damage(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path, "fp8-block", **fp8_directories.RAGGED)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    stored[name] = stored[name][:2].clone()
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(
        DamagedCheckpoint, match=r"up_proj.weight_scale_inv has shape \[2, 2\] \(float32\) for a weight of \[320, 192\]"
    ):
        HuggingFaceReader(tmp_path)


@pytest.mark.parametrize(
    "spoil", [lambda scale: scale.T, torch.Tensor.int, torch.Tensor.bool], ids=["row", "int", "bool"]
)
def test_what_cannot_be_scales_of_channels_is_damage(tmp_path: Path, spoil: Callable[[Tensor], Tensor]) -> None:
    """A row of as many, for a square weight, is one scale for each input; and no tool stores scales as integers, but
    for exponents in bytes."""
    fp8_directories.make(tmp_path, "fbgemm")
    file = tmp_path / "model.safetensors"
    stored, name = load_file(file), "model.layers.0.self_attn.q_proj.weight_scale"
    stored[name] = spoil(stored[name]).contiguous()
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(DamagedCheckpoint, match=r"q_proj.weight_scale has shape .* for a weight of \[64, 64\]"):
        HuggingFaceReader(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), -1.0])
def test_a_hostile_scale_stops_a_conversion(tmp_path: Path, value: float) -> None:
    fp8_directories.make(tmp_path / "fp8", "fp8-block")
    file = tmp_path / "fp8" / "model.safetensors"
    stored = load_file(file)
    stored["model.layers.1.mlp.up_proj.weight_scale_inv"][0, 0] = value
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(DamagedCheckpoint, match="up_proj.weight_scale_inv holds a scale"):
        run(tmp_path / "fp8", tmp_path / "hf", "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e36])
def test_a_hostile_input_scale_becomes_no_state(tmp_path: Path, value: float) -> None:
    fp8_directories.make(tmp_path / "fp8", "modelopt-tensor")
    file = tmp_path / "fp8" / "model.safetensors"
    stored = load_file(file)
    stored["model.layers.1.mlp.up_proj.input_scale"].fill_(value)
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(DamagedCheckpoint, match="up_proj.input_scale holds a scale"):
        run(tmp_path / "fp8", tmp_path / "megatron", "megatron")
    assert not (tmp_path / "megatron").exists()


def test_scales_of_a_kv_cache_belong_to_no_weight(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "fp8", "modelopt-tensor")
    file = tmp_path / "fp8" / "model.safetensors"
    stored = load_file(file)
    stored["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    save_file(stored, file, metadata={"format": "pt"})
    assert not any("scale" in name for name in HuggingFaceReader(tmp_path / "fp8").specs)
    run(tmp_path / "fp8", tmp_path / "hf", "hf")


def test_scales_of_a_cache_under_llm_compressors_older_names_come_back(tmp_path: Path) -> None:
    """`k_proj.output_scale`, as in directories that llm-compressor 0.1 to 0.3 made with a kv_cache_scheme."""
    fp8_directories.make(tmp_path / "fp8", "compressed-tensor")
    file = tmp_path / "fp8" / "model.safetensors"
    stored = load_file(file)
    for layer, kind in ((0, "k"), (0, "v"), (1, "k"), (1, "v")):
        stored[f"model.layers.{layer}.self_attn.{kind}_proj.output_scale"] = torch.tensor([0.5 + layer])
    save_file(stored, file, metadata={"format": "pt"})
    run(tmp_path / "fp8", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "back", "hf", "fp8")
    back = load_file(tmp_path / "back" / "model.safetensors")
    names = [name for name in stored if name.endswith("output_scale")]
    assert len(names) == 4 and all(torch.equal(back[name], stored[name]) for name in names)


@pytest.mark.parametrize("scale", [torch.ones(3), torch.ones(0)], ids=["wide", "empty"])
def test_scales_of_a_cache_that_cannot_come_back_are_told_on_the_way_there(tmp_path: Path, scale: Tensor) -> None:
    """As vLLM has one for each head."""
    fp8_directories.make(tmp_path / "fp8", "compressed-tensor")
    file = tmp_path / "fp8" / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.k_scale": scale}, file, metadata={"format": "pt"})
    notes = plan_command(Request(tmp_path / "fp8", tmp_path / "megatron", "megatron")).notes
    assert any("not with 1 scale of a KV cache" in note and "k_scale" in note for note in notes)


@pytest.mark.parametrize("bound", [0, -1.0, None, "1200", [], float("inf")])
def test_a_bound_of_inputs_is_a_positive_number(tmp_path: Path, bound: object) -> None:
    fp8_directories.make(tmp_path, "fbgemm")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["activation_scale_ub"] = bound
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PrecisionError, match="activation_scale_ub is .*, not a positive number"):
        HuggingFaceReader(tmp_path)


def test_an_older_modelopt_says_its_method_in_a_file_of_its_own(tmp_path: Path) -> None:
    made = fp8_directories.make(tmp_path, "modelopt-tensor")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    nested = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(nested))
    name, weight = next(iter(made.items()))
    assert torch.equal(decoded(HuggingFaceReader(tmp_path), name), weight.values)


def test_modelopt_is_known_by_its_algorithm_where_it_did_not_write_its_name(tmp_path: Path) -> None:
    """As in Qwen3-32B-FP8-Static-PerTensor, of ModelOpt 0.31."""
    made = fp8_directories.make(tmp_path / "fp8", "modelopt-tensor")
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    tensors = {"dynamic": False, "num_bits": 8, "type": "float"}
    config["quantization_config"] = {
        "config_groups": {"group_0": {"input_activations": tensors, "weights": tensors}},
        "ignore": ["lm_head"],
        "quant_algo": "FP8",
        "kv_cache_scheme": "FP8",
        "producer": {"name": "modelopt", "version": "0.31.0"},
    }
    (tmp_path / "fp8/config.json").write_text(json.dumps(config))
    name, weight = next(iter(made.items()))
    assert torch.equal(decoded(HuggingFaceReader(tmp_path / "fp8"), name), weight.values)
    run(tmp_path / "fp8", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "back", "hf", "fp8")
    assert torch.equal(
        load_file(tmp_path / "back/model.safetensors")[name].view(torch.uint8), weight.codes.view(torch.uint8)
    )


def test_fused_experts_have_a_grid_each(tmp_path: Path) -> None:
    """As transformers names them in memory (FP8Experts): `gate_up_proj` and `gate_up_proj_scale_inv`, by expert."""
    fp8_directories.make(tmp_path, "fp8-block", "qwen3-moe")
    file = tmp_path / "model.safetensors"
    stored, experts = load_file(file), "model.layers.1.mlp.experts"
    parts: dict[str, list[torch.Tensor]] = {}
    for expert in range(8):
        pieces = {part: stored.pop(f"{experts}.{expert}.{part}_proj.weight") for part in ("gate", "up", "down")}
        for part in ("gate", "up", "down"):
            del stored[f"{experts}.{expert}.{part}_proj.weight_scale_inv"]
        bytes_ = [pieces[part].view(torch.uint8) for part in ("gate", "up")]
        parts.setdefault("gate_up_proj", []).append(torch.cat(bytes_))
        parts.setdefault("down_proj", []).append(pieces["down"].view(torch.uint8))
    generator = torch.Generator().manual_seed(3)
    for part, found in parts.items():
        stored[f"{experts}.{part}"] = torch.stack(found).view(torch.float8_e4m3fn)
        stored[f"{experts}.{part}_scale_inv"] = fp8_directories.random_scales((8, 1, 1), generator, torch.float32)
    save_file(stored, file, metadata={"format": "pt"})
    reader = HuggingFaceReader(tmp_path)
    for part, found in parts.items():
        for expert in range(8):
            scale = stored[f"{experts}.{part}_scale_inv"][expert]
            expected = found[expert].view(torch.float8_e4m3fn).float() * scale
            assert torch.equal(decoded(reader, f"{experts}.{part}[{expert}]"), expected)
