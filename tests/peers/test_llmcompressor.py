"""Directories that llm-compressor makes decode to what its own compressed-tensors decompresses, and come back."""

import subprocess
from pathlib import Path

import environments
import fp8_directories
import pico
import pytest
import torch
from safetensors.torch import load_file

from precisionctl.checkpoints.base import read_tensor
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.commands import Conversion, plan_conversion
from precisionctl.work import execute

SCRIPT = Path(__file__).with_name("llmcompressor_export.py")
INSTALL = ("llmcompressor==0.14.0.1", f"torch=={torch.__version__.partition('+')[0]}")


@pytest.fixture(scope="module", params=["FP8", "FP8_DYNAMIC", "FP8_BLOCK"])
def made(request, tmp_path_factory):
    python = environments.python_with("llmcompressor", INSTALL)
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
        ours = reader.encodings[name].decode_rows(read_tensor(reader, name), 0, torch.bfloat16)
        assert values.dtype == torch.bfloat16 and torch.equal(ours, values), name


def test_a_conversion_writes_those_values_and_the_way_back_the_same_directory(made, tmp_path):
    directory, expected = made
    for source, target, to, precision in (
        (directory, "megatron", "megatron", "keep"),
        (tmp_path / "megatron", "bf16", "hf", "keep"),
        (tmp_path / "megatron", "back", "hf", "fp8"),
    ):
        execute(plan_conversion(Conversion(source, tmp_path / target, to, precision)))
    values = load_file(tmp_path / "bf16" / "model.safetensors")
    assert all(torch.equal(values[name], expected[name]) for name in expected)
    before, after = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "back"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and tensor.shape == after[name].shape
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), after[name].reshape(-1).view(torch.uint8)), name
