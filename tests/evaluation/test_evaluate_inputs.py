"""What inputs become beside stored codes where no tensor says it: as compressed-tensors simulates it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import four_bit_directories
import fp8_directories
import in_memory
import numpy as np
import pytest
import quark_configs
import torch
from fp8_directories import decoded_by_transformers
from installed import need_loader
from safetensors.torch import load_file, save_file
from scoring import TOKENS, in_fp32, save
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.errors import DamagedCheckpoint, PrecisionError
from precisionctl.evaluate import evaluate, load
from precisionctl.trainer.data.megatron import write_index

FP8_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
INT8_TOKENS = {**FP8_TOKENS, "type": "int"}


def configured(directory: Path, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Change a directory's `quantization_config`."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": change(config["quantization_config"])}))


def agrees_with_compressed_tensors(directory: Path) -> str:
    """Compares logits with transformers', whose linears round inputs by compressed-tensors; and says the precision."""
    need_loader(directory)
    model, precision = load(HuggingFaceReader(directory))
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    plain = decoded_by_transformers(directory, CompressedTensorsConfig(dequantize=True))
    with torch.no_grad():
        ours, expected = model(TOKENS)[..., :250], theirs(TOKENS).logits
        rounding = (plain(TOKENS).logits - expected).norm()
    assert rounding > 0.001 * expected.norm()
    assert (ours - expected).norm() < 0.001 * rounding
    return precision


@pytest.mark.parametrize("first", [["re:.*self_attn.*"], ["Linear"], ["Linear", "re:.*mlp.*"]])
def test_groups_of_fp8_that_differ_in_their_inputs_alone_are_told_apart_by_their_targets(
    tmp_path: Path, first: list[str]
) -> None:
    """Of a target that both have, the second group's counts."""
    save(tmp_path / "source", dtype=torch.bfloat16)
    source = in_memory.with_state(HuggingFaceReader(tmp_path / "source"))
    in_memory.export(source, tmp_path / "out", "compressed-tensors", "dynamic")
    in_fp32(tmp_path / "out")

    def two_groups(config: dict[str, Any]) -> dict[str, Any]:
        group = config["config_groups"]["group_0"]
        alone = {**group, "targets": ["re:.*mlp.*"], "input_activations": None}
        return config | {"config_groups": {"group_0": group | {"targets": first}, "group_1": alone}}

    configured(tmp_path / "out", two_groups)
    words = agrees_with_compressed_tensors(tmp_path / "out")
    assert words == "FP8 codes with dynamic per-token input scales and weights from FP8"


@pytest.mark.parametrize(
    ("target", "decoded"),
    [
        (r"re:.*\.qkv_proj$", True),
        (r"re:.*\.q_proj$", False),  # not the other parts
        (r"re:.*\.(q|k|v)_proj$", True),
    ],
)
def test_a_group_counts_for_linears_as_vllm_fuses_them(tmp_path: Path, target: str, decoded: bool) -> None:
    """vLLM 0.33 compressed_tensors/utils.py find_matched_target."""
    save(tmp_path / "source", dtype=torch.bfloat16)
    source = in_memory.with_state(HuggingFaceReader(tmp_path / "source"))
    in_memory.export(source, tmp_path / "out", "compressed-tensors", "dynamic")

    def two_groups(config: dict[str, Any]) -> dict[str, Any]:
        group = config["config_groups"]["group_0"]
        alone = {**group, "targets": [target], "input_activations": None}
        return config | {"config_groups": {"group_0": group, "group_1": alone}}

    configured(tmp_path / "out", two_groups)
    model, _ = load(HuggingFaceReader(tmp_path / "out"))
    layer = model.decoder.layers[0]
    assert ("input" in layer.self_attention.linear_qkv.quantizers) == (not decoded)
    assert "input" in layer.self_attention.linear_proj.quantizers and "input" in layer.mlp.linear_fc1.quantizers


@pytest.mark.parametrize("spelling", ["ct-int4-128", "ct-int4-32", "ct-int4-channel"])
def test_inputs_of_int4_weights_are_rounded_to_fp8_where_the_config_says_so(tmp_path: Path, spelling: str) -> None:
    four_bit_directories.make(tmp_path, spelling)
    in_fp32(tmp_path)
    group = four_bit_directories.SPELLINGS[spelling].config["config_groups"]["group_0"]
    groups = {"group_0": group | {"input_activations": FP8_TOKENS}}
    configured(tmp_path, lambda config: config | {"config_groups": groups, "quantization_status": "compressed"})
    assert agrees_with_compressed_tensors(tmp_path) == "INT4 codes with dynamic per-token input scales"


UNCOMPUTED = {
    "ct-int4-128": {**FP8_TOKENS, "strategy": "tensor"},
    "ct-int4-32": INT8_TOKENS,
    "ct-mxfp4": FP8_TOKENS,
    "ct-nvfp4a16": INT8_TOKENS,
    "ct-fp8": INT8_TOKENS,
}


@pytest.mark.parametrize("spelling", UNCOMPUTED)
def test_inputs_that_are_not_computed_are_said_by_name(tmp_path: Path, spelling: str) -> None:
    if spelling == "ct-fp8":
        fp8_directories.make(tmp_path, "compressed-weights-alone")
    else:
        four_bit_directories.make(tmp_path, spelling)

    def with_inputs(config: dict[str, Any]) -> dict[str, Any]:
        (group,) = config["config_groups"].values()
        return config | {"config_groups": {"group_0": group | {"input_activations": UNCOMPUTED[spelling]}}}

    configured(tmp_path, with_inputs)
    _, words = load(HuggingFaceReader(tmp_path))
    kind = UNCOMPUTED[spelling]
    said = f"num_bits 8, type '{kind['type']}', strategy '{kind['strategy']}', dynamic True"
    assert words.startswith("bfloat16, with weights from ") and words.endswith(f" (not computed: inputs of {said})")


def test_modelopts_w4a8_is_said_by_its_name(tmp_path: Path) -> None:
    four_bit_directories.make(tmp_path, "modelopt-mxfp4")
    configured(tmp_path, lambda config: config | {"quant_algo": "W4A8_MXFP4_FP8"})
    _, words = load(HuggingFaceReader(tmp_path))
    assert words == "bfloat16, with weights from MXFP4 (not computed: inputs of W4A8_MXFP4_FP8)"


LAYER = "model.layers.0.mlp"


def mixed_by_modelopt(config: dict[str, Any]) -> dict[str, Any]:
    attention = {f"model.layers.0.self_attn.{part}_proj": {"quant_algo": "mxfp4"} for part in "qkvo"}
    layers = attention | {f"{LAYER}.{part}_proj": {"quant_algo": "W4A8_MXFP4_FP8"} for part in ("gate", "up", "down")}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def mixed_by_quark(config: dict[str, Any]) -> dict[str, Any]:
    alone = {"*.mlp.*": quark_configs.layer(quark_configs.MXFP4, None)}
    return quark_configs.config(quark_configs.MXFP4, quark_configs.MXFP4_INPUTS, alone)


@pytest.mark.parametrize(
    ("spelling", "mixed", "words"),
    [
        ("modelopt-mxfp4", mixed_by_modelopt, "weights from MXFP4 (not computed: inputs of W4A8_MXFP4_FP8)"),
        ("quark-mxfp4", mixed_by_quark, "weights from MXFP4"),
    ],
)
def test_layers_that_a_config_names_have_their_own_inputs(
    tmp_path: Path, spelling: str, mixed: Callable[[dict[str, Any]], dict[str, Any]], words: str
) -> None:
    four_bit_directories.make(tmp_path, spelling)
    configured(tmp_path, mixed)
    model, precision = load(HuggingFaceReader(tmp_path))
    assert precision == f"MXFP4 codes with dynamic per-32 input scales and {words}"
    layer = model.decoder.layers[0]
    assert (
        "input" in layer.self_attention.linear_qkv.quantizers and "input" in layer.self_attention.linear_proj.quantizers
    )
    assert "input" not in layer.mlp.linear_fc1.quantizers and "input" not in layer.mlp.linear_fc2.quantizers


def test_modelopts_layers_are_linears_by_their_whole_names(tmp_path: Path) -> None:
    """vLLM and SGLang take a path for experts alone, and leave other linears below it in BF16."""
    four_bit_directories.make(tmp_path, "modelopt-mxfp4")
    attention = mixed_by_modelopt({})["quantized_layers"]
    layers = {name: each for name, each in attention.items() if "mlp" not in name}
    configured(
        tmp_path,
        lambda config: (
            mixed_by_modelopt(config) | {"quantized_layers": layers | {LAYER: {"quant_algo": "W4A8_MXFP4_FP8"}}}
        ),
    )
    with pytest.raises(PrecisionError, match="does not give `model.layers.0.mlp.gate_proj.weight` one of them"):
        load(HuggingFaceReader(tmp_path))


@pytest.mark.parametrize("places", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_of_several_patterns_that_mean_a_linear_the_first_counts(tmp_path: Path, places: tuple[int, ...]) -> None:
    """As in vLLM's and SGLang's find_matched_target. The third, whose format is the first's, means no layer."""
    four_bit_directories.make(tmp_path, "ct-mxfp4")
    targets = ("re:.*layers.*", "re:.*(self_attn|mlp).*", "re:.*nowhere.*")

    def several(config: dict[str, Any]) -> dict[str, Any]:
        (group,) = config["config_groups"].values()
        inputs = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True}
        made = [
            group | {"targets": [each], "input_activations": None if i == 1 else inputs}
            for i, each in enumerate(targets)
        ]
        return config | {"config_groups": {f"group_{place}": made[place] for place in places}}

    configured(tmp_path, several)
    model, _ = load(HuggingFaceReader(tmp_path))
    rounded = "input" in model.decoder.layers[0].mlp.linear_fc2.quantizers
    assert rounded == (places.index(0) < places.index(1))


def test_linears_that_are_computed_as_one_and_whose_inputs_differ_are_refused(tmp_path: Path) -> None:
    four_bit_directories.make(tmp_path, "quark-mxfp4")
    alone = {"*.q_proj": quark_configs.layer(quark_configs.MXFP4, None)}
    both = quark_configs.config(quark_configs.MXFP4, quark_configs.MXFP4_INPUTS, alone)
    configured(tmp_path, lambda config: both)
    with pytest.raises(PrecisionError, match=r"several formats of inputs.*self_attn\.q_proj"):
        load(HuggingFaceReader(tmp_path))


@pytest.mark.parametrize("bound", [1200.0, 0.75])
def test_tokens_beyond_fbgemms_bound_are_cut_off_there(tmp_path: Path, bound: float) -> None:
    """Number by number: vLLM's kernel (fp8/common.cu, dynamic_per_token_scaled_fp8_quant_kernel: `fminf(absmax,
    *scale_ub)`), and FBGEMM's quantize_fp8_per_row."""
    fp8_directories.make(tmp_path, "fbgemm")
    configured(tmp_path, lambda config: config | {"activation_scale_ub": bound})
    model, _ = load(HuggingFaceReader(tmp_path))
    linear = model.decoder.layers[0].mlp.linear_fc2
    values = torch.randn(8, linear.weight.shape[1], generator=torch.Generator().manual_seed(1))
    found = linear.quantizers["input"].quantize(values).rows
    scales = [np.float32(min(float(row.abs().max()), bound)) / np.float32(448) for row in values]
    assert found.scale_inv.flatten().tolist() == scales
    for row, scale, codes in zip(values, scales, found.codes, strict=True):
        expected = [max(-448.0, min(448.0, float(np.float32(value) / scale))) for value in row.tolist()]
        assert torch.equal(codes.float(), torch.tensor(expected).to(torch.float8_e4m3fn).float())
    assert bool((found.codes.float().abs() == 448).sum(1).gt(9).all()) == (bound < 1)


def test_token_ids_are_evaluated_without_a_tokenizer_to_the_same_number(tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(1, 250, 200).astype(np.uint16)
    ids.tofile(tmp_path / "corpus.bin")
    write_index(tmp_path / "corpus.idx", np.array([200], np.int32), 8)
    save(tmp_path / "model")
    known = evaluate(HuggingFaceReader(tmp_path / "model"), tmp_path / "corpus", sequence_length=24)
    for file in (tmp_path / "model").glob("tokenizer*"):
        file.unlink()
    found = evaluate(HuggingFaceReader(tmp_path / "model"), tmp_path / "corpus", sequence_length=24)
    assert replace(found, notes=known.notes) == known
    assert "does not end in the tokenizer's end-of-text" in known.notes[0] and "no tokenizer" in found.notes[0]


@pytest.mark.parametrize("scale", [-1.0, np.nan, np.inf])
@pytest.mark.parametrize("scheme", ["static", "nvfp4"])
def test_a_fixed_scale_that_is_none_is_not_passed_over(tmp_path: Path, scheme: Any, scale: float) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128} if scheme == "nvfp4" else {}
    save(tmp_path / "source", dtype=torch.bfloat16, **sizes)
    source = in_memory.with_state(HuggingFaceReader(tmp_path / "source"))
    in_memory.export(source, tmp_path / "out", "compressed-tensors", scheme)
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    kind = "input_global_scale" if scheme == "nvfp4" else "input_scale"
    assert any(name.endswith(kind) for name in tensors)
    for name in (name for name in tensors if name.endswith(kind)):
        tensors[name] = torch.full_like(tensors[name], scale)
    save_file(tensors, file)
    with pytest.raises(DamagedCheckpoint, match="negative, infinite or NaN"):
        load(HuggingFaceReader(tmp_path / "out"))
