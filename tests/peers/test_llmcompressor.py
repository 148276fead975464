"""Directories that llm-compressor makes decode to what its own compressed-tensors decompresses, and come back."""

import subprocess
from pathlib import Path

import environments
import four_bit_models
import fp8_directories
import pico
import pytest
import torch
from safetensors.torch import load_file

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.codes import numerics
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute

SCRIPT = Path(__file__).with_name("llmcompressor_export.py")


@pytest.fixture(scope="module", params=["FP8", "FP8_DYNAMIC", "FP8_BLOCK"])
def made(request, tmp_path_factory):
    python = environments.llm_compressor()
    folder = tmp_path_factory.mktemp(request.param)
    pico.save(folder / "source", "llama-3", dtype=torch.bfloat16, **fp8_directories.RAGGED)
    command = [python, SCRIPT, folder / "source", folder / "fp8", request.param]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "fp8", load_file(folder / "fp8-expected.safetensors")


def test_every_weight_decodes_to_what_llm_compressor_says(made):
    """It multiplies in BF16, the dtype of its scales: one rounding, as ours of the FP32 product."""
    directory, expected = made
    reader = HuggingFaceReader(directory)
    assert set(reader.encodings) == set(expected) and len(expected) == 14
    for name, values in expected.items():
        ours = reader.encodings[name].decode_rows(read_tensor(reader, name), 0).bfloat16()
        assert values.dtype == torch.bfloat16 and torch.equal(ours, values), name


def test_codes_are_those_of_a_division_by_its_scales_but_for_its_own_rounding_in_bf16(made, capsys):
    """Our codes under its scales are a division in FP32. It divides in BF16, which is told of: some 3 % of codes."""
    directory, _ = made
    source = load_file(directory.parent / "source" / "model.safetensors")
    stored, reader = load_file(directory / "model.safetensors"), HuggingFaceReader(directory)
    others = total = 0
    for name, encoding in reader.encodings.items():
        weight, codes = source[name], stored[name]
        scale = by_element(encoding.scale_inv, encoding.block, weight)
        expected = saturated(weight.float() / scale)
        ours, scratch = torch.empty_like(codes), torch.empty(numerics.PIECE)
        encoding.encode_rows(weight, 0, ours, scratch)
        assert torch.equal(bits(ours), bits(expected)), name
        rounded = saturated((weight / scale.bfloat16()).float())
        assert torch.equal(bits(codes), bits(rounded)), name
        others += int((bits(codes) != bits(expected)).sum())
        total += codes.numel()
    with capsys.disabled():
        print(
            f"\nllm-compressor, {directory.parent.name}: {others / total:.2%} of codes are others for dividing in BF16"
        )
    assert 0 < others < 0.1 * total


def by_element(scale_inv, block, weight):
    """The FP32 scale of each element of a weight."""
    rows, columns = (torch.arange(size) // each for size, each in zip(weight.shape, block, strict=True))
    return scale_inv.float()[rows][:, columns]


def saturated(values):
    return values.clamp(-448, 448).to(torch.float8_e4m3fn)


def bits(codes):
    return codes.view(torch.uint8)


def test_a_conversion_writes_those_values_and_the_way_back_the_same_directory(made, tmp_path):
    directory, expected = made
    for source, target, to, precision in (
        (directory, "megatron", "megatron", "keep"),
        (tmp_path / "megatron", "bf16", "hf", "keep"),
        (tmp_path / "megatron", "back", "hf", "fp8"),
    ):
        execute(plan_command(Request(source, tmp_path / target, to, precision)))
    values = load_file(tmp_path / "bf16" / "model.safetensors")
    assert all(torch.equal(values[name], expected[name]) for name in expected)
    before, after = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "back"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and tensor.shape == after[name].shape
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), after[name].reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("scheme", ["W8A8", "W8A16"])
def test_int8_decodes_to_what_it_decompresses_and_comes_back(scheme, tmp_path):
    """In bytes with a scale for each channel, and in words with one for each 128 inputs."""
    four_bit_models.save(tmp_path / "source", "llama")
    command = [environments.llm_compressor(), SCRIPT, tmp_path / "source", tmp_path / "int8", scheme]
    subprocess.run(command, check=True, capture_output=True)
    expected = load_file(tmp_path / "int8-expected.safetensors")
    assert len(expected) == 14
    for source, target, to, precision in (
        ("int8", "megatron", "megatron", "keep"),
        ("megatron", "bf16", "hf", "keep"),
        ("megatron", "back", "hf", "fp8"),
    ):
        execute(plan_command(Request(tmp_path / source, tmp_path / target, to, precision)))
    values = load_file(tmp_path / "bf16" / "model.safetensors")
    assert all(torch.equal(bits(values[name]), bits(each)) for name, each in expected.items())
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("int8", "back"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and tensor.shape == after[name].shape
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), after[name].reshape(-1).view(torch.uint8)), name
