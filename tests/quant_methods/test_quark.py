"""Quark's directories: which weights are in which format, what is refused, scales of KV caches, and how inputs of MXFP4
are rounded. The spellings themselves are among those of fp8_directories.py and four_bit_directories.py."""

import json
import math
from pathlib import Path
from typing import Any

import four_bit_directories
import fp8_directories
import pytest
import quark_configs
import torch
from conversions import carry_out, run as convert
from quark_configs import CHANNELS, FP8, MXFP4, MXFP4_INPUTS, TOKENS
from safetensors.torch import load_file, save_file
from torch import Tensor

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.request import Request
from precisionctl.engines.base import engines
from precisionctl.errors import PrecisionctlError, PrecisionError, RecipeError
from precisionctl.evaluate import load
from precisionctl.evaluate.quantizers import Mxfp4Inputs
from precisionctl.quant_methods.quark import read
from precisionctl.reports.inspect import describe
from precisionctl.verify.engine_rules import check


def stored(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def configure(directory: Path, quantization: dict[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))


def assert_same(a: Path, b: Path) -> None:
    left, right = stored(a), stored(b)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert (tensor.dtype, tensor.shape) == (right[name].dtype, right[name].shape), name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), right[name].reshape(-1).view(torch.uint8)), name


def mixed(directory: Path) -> dict[str, Any]:
    """MXFP4, and FP8 with a scale for each channel in the attention, for the whole of the output projection. Returns
    the layers' own settings."""
    four_bit_directories.make(directory, "quark-mxfp4", quantized=lambda name: "mlp" in name)
    tensors, attention = stored(directory), "model.layers.0.self_attn."
    for part in "qkvo":
        name = f"{attention}{part}_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.rand(() if part == "o" else (len(tensors[name]),)) + 0.1
    tensors[f"{attention}o_proj.input_scale"] = torch.tensor(0.02)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    layers = {"*o_proj": quark_configs.layer(FP8, FP8), "*self_attn*": quark_configs.layer(CHANNELS, TOKENS)}
    configure(directory, quark_configs.config(MXFP4, MXFP4_INPUTS, layers))
    return layers


def test_layers_with_settings_of_their_own_are_in_other_formats(tmp_path: Path) -> None:
    mixed(tmp_path / "source")
    assert describe(open_checkpoint(tmp_path / "source"))["coded"] == {
        "quant_method": "quark",
        "formats": {"FP8": 4, "MXFP4": 3},
        "weights_by_scale": {"channel": 3, "block of 1 x 32": 3, "tensor": 1},
        "static_input_scales": 1,
    }
    convert(tmp_path / "source", tmp_path / "megatron", "megatron")
    convert(tmp_path / "megatron", tmp_path / "back", "hf", precision="fp8")
    assert_same(tmp_path / "source", tmp_path / "back")
    _, precision = load(HuggingFaceReader(tmp_path / "source"))
    assert set(precision.split(" and ")) == {
        "FP8 codes with dynamic per-token input scales",
        "FP8 codes with static input scales",
        "MXFP4 codes with dynamic per-32 input scales",
    }


def test_experts_are_codes_too(tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 32, "hidden_size": 64, "num_experts": 2, "num_experts_per_tok": 1}
    values = four_bit_directories.make(tmp_path / "source", "quark-mxfp4", "qwen3-moe", num_hidden_layers=2, **sizes)
    assert any(".experts.1." in name for name in values)
    convert(tmp_path / "source", tmp_path / "megatron", "megatron")
    convert(tmp_path / "megatron", tmp_path / "bf16", "hf")
    assert all(torch.equal(stored(tmp_path / "bf16")[name], expected.bfloat16()) for name, expected in values.items())
    convert(tmp_path / "megatron", tmp_path / "back", "hf", precision="fp8")
    assert_same(tmp_path / "source", tmp_path / "back")


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """FP8, with scales of a KV cache as Quark names them: those of the outputs of k and v."""
    fp8_directories.make(tmp_path / "source", "quark-tensor")
    tensors = stored(tmp_path / "source")
    for name in [name for name in tensors if name.endswith(("k_proj.weight", "v_proj.weight"))]:
        tensors[name.replace(".weight", ".output_scale")] = torch.tensor(0.03125).bfloat16()
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    layers = {f"*{each}_proj": quark_configs.layer(FP8, FP8, FP8) for each in "kv"}
    quantization = quark_configs.config(FP8, FP8, layers, kv_cache_quant_config=layers)
    quantization["export"]["kv_cache_group"] = ["*k_proj", "*v_proj"]
    configure(tmp_path / "source", quantization)
    return tmp_path / "source"


def test_scales_of_a_kv_cache_come_back_and_round_keys_and_values(cached: Path) -> None:
    convert(cached, cached.parent / "megatron", "megatron")
    convert(cached.parent / "megatron", cached.parent / "back", "hf", precision="fp8")
    assert_same(cached, cached.parent / "back")
    model, precision = load(HuggingFaceReader(cached))
    assert precision == "FP8 codes with static input scales, FP8 KV cache"
    attention = model.decoder.layers[0].self_attention
    assert any(module._forward_pre_hooks for module in attention.modules())


def test_an_export_for_vllm_keeps_codes_input_scales_and_those_of_the_cache(cached: Path) -> None:
    """Codes of q, k and v, and of gate and up, are encoded again, since compressed-tensors' engines share a scale."""
    notes = carry_out(Request.export(cached, cached.parent / "out", "vllm", "static", kv_cache="fp8")).notes
    assert any("Input scales are the fixed ones of the source's weights." in note for note in notes)
    before, after = stored(cached), stored(cached.parent / "out")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        for end in ("weight", "weight_scale", "input_scale"):
            left, right = before[f"model.layers.0.{name}.{end}"], after[f"model.layers.0.{name}.{end}"]
            assert torch.equal(left.float().reshape(-1), right.float().reshape(-1))
    assert float(after["model.layers.0.self_attn.k_scale"]) == 0.03125


def findings(directory: Path) -> tuple[list[str], list[str]]:
    """What vLLM does not load or computes wrongly, and what costs it accuracy or speed."""
    found = check(open_checkpoint(directory), engines()["vllm"])
    return [str(each) for each in found if each.rule.fatal], [str(each) for each in found if not each.rule.fatal]


def test_rules_of_vllm_are_kept_by_what_quark_writes(cached: Path, tmp_path: Path) -> None:
    """Of scales per tensor that differ among linears that it fuses, and of the head, which it never takes for one."""
    fatal, costs = findings(cached)
    assert fatal == [] and all("of one fused group differ" in each for each in costs), costs
    fp8_directories.make(tmp_path / "channels", "quark-channel", tie_word_embeddings=False)
    four_bit_directories.make(tmp_path / "mxfp4", "quark-mxfp4")
    assert findings(tmp_path / "channels") == findings(tmp_path / "mxfp4") == ([], [])
    with pytest.raises(RecipeError, match="no rules of SGLang for FP8 as this directory stores it"):
        check(open_checkpoint(cached), engines()["sglang"])


def test_layers_of_several_formats_keep_vllms_rules_if_none_is_fused_with_another(tmp_path: Path) -> None:
    """MXFP4 in the MLP, FP8 in the attention: per tensor in the output projection, per channel in the others."""
    layers = mixed(tmp_path)
    assert findings(tmp_path)[0] == []
    tensors = stored(tmp_path)
    tensors["model.layers.0.self_attn.v_proj.input_scale"] = torch.tensor(0.02)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    layers = {"*v_proj": quark_configs.layer(CHANNELS, FP8), **layers}
    configure(tmp_path, quark_configs.config(MXFP4, MXFP4_INPUTS, layers))
    assert any("codes in another format than those that it is fused with" in each for each in findings(tmp_path)[0])


@pytest.mark.parametrize(
    ("missing", "word"),
    [
        ("export", "no export.kv_cache_group"),
        ("exclude", "no exclude"),
        ("layer_type_quant_config", "no layer_type_quant_config"),
    ],
)
def test_vllm_asks_quarks_config_for_keys(cached: Path, missing: str, word: str) -> None:
    config = json.loads((cached / "config.json").read_text())["quantization_config"]
    del config[missing]
    configure(cached, config)
    assert any(word in each for each in findings(cached)[0])


def test_vllm_has_one_dimension_for_quarks_channels(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path, "quark-channel")
    tensors = stored(tmp_path)
    tensors = {name: each.view(-1, 1) if name.endswith("_scale") else each for name, each in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert any("shape [256, 1], not [256]" in each or "scales of channels" in each for each in findings(tmp_path)[0])


def test_a_cache_that_nothing_says_to_be_fp8_stays_as_it_is_in_vllm(cached: Path) -> None:
    assert not any("nothing says to be FP8" in each for each in findings(cached)[1])
    configure(cached, quark_configs.config(FP8, FP8))
    assert any("nothing says to be FP8" in each for each in findings(cached)[1])


def changed(**changes: Any) -> dict[str, Any]:
    return quark_configs.config({**FP8, **changes}, FP8)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (changed(dtype="int4"), "weights are dtype 'int4'"),
        (changed(dtype="fp8_e5m2"), "weights are dtype 'fp8_e5m2'"),
        (changed(qscheme="per_block"), "qscheme 'per_block'"),
        (changed(qscheme="per_channel", ch_axis=1), "ch_axis 1"),
        (changed(is_dynamic=True), "no scales"),
        (changed(symmetric=False), "zero points"),
        (quark_configs.config([MXFP4, FP8], [MXFP4, FP8]), "weight is quantized in 2 steps: dtype 'fp4'"),
        (quark_configs.config({**MXFP4, "group_size": 16}, None), "group_size 16"),
        (quark_configs.config({**MXFP4, "scale_format": "e5m3"}, None), "scale_format 'e5m3'"),
        (quark_configs.config({**MXFP4, "dtype": "fp6_e2m3"}, None), "fp6_e2m3"),
        (quark_configs.config(MXFP4, FP8), "inputs of MXFP4 weights are dtype 'fp8_e4m3'"),
        (quark_configs.config(MXFP4, {**MXFP4_INPUTS, "scale_calculation_mode": "floor"}), "'floor'"),
        (quark_configs.config(FP8, None), "inputs of FP8 weights are not quantized"),
        (quark_configs.config(FP8, {**FP8, "is_dynamic": True}), "inputs of FP8 weights"),
        (quark_configs.config(None, None), "no weight is quantized"),
        (
            quark_configs.config(FP8, FP8, {"*k_proj": quark_configs.layer(FP8, FP8, {**FP8, "dtype": "int8"})}),
            "outputs",
        ),
        (quark_configs.config(FP8, FP8, {"*k_proj": {**quark_configs.layer(FP8, FP8), "bias": FP8}}), "biases"),
        (quark_configs.config(FP8, FP8, {"*": [1]}), r"`\*` is"),
        (quark_configs.config(FP8, FP8, algo_config=[{"name": "rotation"}]), "'rotation'"),
        (quark_configs.config(FP8, FP8, pre_quant_opt_config=[{"name": "quarot"}]), "'quarot'"),
        (quark_configs.config(FP8, FP8, export={"weight_format": "fake_quantized"}), "'fake_quantized'"),
    ],
)
def test_what_is_not_read_is_refused_by_its_name(config: dict[str, Any], why: str) -> None:
    with pytest.raises(PrecisionError, match=why):
        read(config)


def test_smoothing_leaves_plain_weights() -> None:
    """So do AWQ and GPTQ: what they change are the weights themselves, and norms."""
    algorithms = [{"name": name} for name in ("smooth", "autosmoothquant", "awq", "gptq")]
    assert read(quark_configs.config(FP8, FP8, algo_config=algorithms)).scheme == "static"


def test_a_tensor_of_a_rotation_is_refused_by_its_name(cached: Path) -> None:
    tensors = stored(cached) | {"model.layers.0.mlp.down_proj.input_rotation": torch.ones(8, 8, dtype=torch.int8)}
    save_file(tensors, cached / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PrecisionctlError, match=r"down_proj\.input_rotation"):
        convert(cached, cached.parent / "bf16", "hf")


def test_inputs_in_mxfp4_are_rounded_under_the_scales_that_weights_get() -> None:
    """2^(floor(log2(amax, its mantissa rounded to one bit)) - 2), by a slow reference."""
    values = torch.randn(16, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[2, :32], values[3, 32:64] = 0, 6.9
    found = Mxfp4Inputs(even=True).quantize(values).rows
    decoded = found.summands() * found.multiplier()
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for row in range(16):
        for start in range(0, 96, 32):
            group = values[row, start : start + 32].double()
            amax = float(group.abs().max())
            if not amax:
                assert not decoded[row, start : start + 32].any()
                continue
            exponent = math.floor(math.log2(amax))
            up = amax / 2.0**exponent >= 1.75
            scale = 2.0 ** (exponent + up - 2)
            for value, ours in zip(group.tolist(), decoded[row, start : start + 32].tolist(), strict=True):
                least = min(abs(abs(value) / scale - number) for number in numbers)
                assert abs(abs(ours) / scale - abs(value) / scale) == least
