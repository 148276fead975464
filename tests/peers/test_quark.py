"""Directories that AMD's Quark makes: every weight decodes to what its own layers decode it to, comes back from
Megatron with the same bytes, and its inputs are rounded as its layers round them."""

import subprocess
from pathlib import Path

import conversions
import environments
import four_bit_models
import pytest
import torch
from safetensors.torch import load_file

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.evaluate import load

SCRIPT = Path(__file__).with_name("quark_export.py")
SCHEMES = ["fp8", "fp8-kv", "fp8-channel", "mxfp4", "mixed"]


@pytest.fixture(scope="module", params=SCHEMES)
def made(request, tmp_path_factory):
    """A directory, what Quark makes of its weights, inputs, and what it makes of them. (Of a model with experts, Quark
    0.13 leaves them as values: transformers 5.24 has all of a layer in one tensor.)"""
    folder = tmp_path_factory.mktemp(request.param)
    four_bit_models.save(folder / "source", "llama")
    command = [environments.quark(), SCRIPT, folder / "source", folder / request.param, request.param]
    subprocess.run(command, check=True, capture_output=True)
    expected = load_file(folder / f"{request.param}-expected.safetensors")
    return folder / request.param, expected, expected.pop("inputs"), expected.pop("rounded")


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_every_weight_decodes_to_what_quark_says(made):
    directory, expected, _, _ = made
    reader = HuggingFaceReader(directory)
    assert set(reader.encodings) == set(expected) and len(expected) == 14
    for name, values in expected.items():
        found = reader.encodings[name].decode_rows(read_tensor(reader, name), 0)
        assert torch.equal(bits(found.bfloat16()), bits(values.bfloat16())), name


def test_it_comes_back_from_megatron_with_the_same_bytes(made, tmp_path):
    directory, expected, _, _ = made
    conversions.run(directory, tmp_path / "megatron", "megatron")
    notes = conversions.run(tmp_path / "megatron", tmp_path / "back", "hf", "fp8").notes
    assert any(f"{len(expected)} of {len(expected)} weights have the same codes" in note for note in notes)
    before, after = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "back"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (tensor.dtype, tensor.shape) == (after[name].dtype, after[name].shape), name
        assert torch.equal(bits(tensor), bits(after[name])), name


def test_inputs_of_mxfp4_are_rounded_as_quark_does(made):
    """Those of FP8 are rounded by vLLM's arithmetic, as of any other directory."""
    directory, _, inputs, rounded = made
    if directory.name not in ("mxfp4", "mixed"):
        pytest.skip("not MXFP4")
    model, _ = load(HuggingFaceReader(directory))
    operand = model.decoder.layers[0].mlp.linear_fc1.quantizers["input"].quantize(inputs).rows
    assert torch.equal(operand.summands() * operand.multiplier(), rounded)
