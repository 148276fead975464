"""Our ModelOpt exports beside those that ModelOpt itself writes for the same model."""

import functools
import json
import subprocess
from pathlib import Path

import environments
import fp8_directories
import in_memory
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

SCRIPT = Path(__file__).with_name("modelopt_export.py")
FAMILIES = ("llama-3", "llama-tied", "llama-all-biases", "mistral")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Makes ModelOpt's directory and ours for a family and a scheme, once each."""
    python = environments.modelopt()

    @functools.cache
    def export(family, scheme):
        folder = tmp_path_factory.mktemp("exports")
        source, theirs, ours = (folder / name for name in ("source", "theirs", "ours"))
        pico.save(source, family, dtype=torch.bfloat16)
        subprocess.run([python, SCRIPT, source, theirs, scheme], check=True, capture_output=True)
        in_memory.export(in_memory.with_state(HuggingFaceReader(source)), ours, "modelopt", scheme)
        return theirs, ours

    return export


def tensors(directory):
    return load_file(directory / "model.safetensors")


def read(directory, name):
    return json.loads((directory / name).read_text())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_names_shapes_dtypes_and_json_are_those_of_modelopt(exported, family, scheme):
    theirs, ours = exported(family, scheme)
    expected, found = ({name: (t.dtype, t.shape) for name, t in tensors(path).items()} for path in (theirs, ours))
    assert found == expected
    assert read(ours, "hf_quant_config.json") == read(theirs, "hf_quant_config.json")
    key = "quantization_config"
    assert read(ours, "config.json")[key] == read(theirs, "config.json")[key]


@pytest.mark.parametrize("family", FAMILIES)
def test_codes_and_scales_per_channel_are_those_of_modelopt_to_the_bit(exported, family):
    """Static ones are not: ModelOpt gives each of q/k/v a scale of its own, and divides in BF16."""
    expected, found = map(tensors, exported(family, "dynamic"))
    for name, values in expected.items():
        assert torch.equal(found[name].view(torch.uint8), values.view(torch.uint8)), name


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_codes_are_those_of_a_division_by_its_scales_but_for_its_own_rounding_in_bf16(exported, scheme, capsys):
    """Our codes under its scales are a division in FP32; its own, per tensor, are one in BF16, which is told of."""
    theirs, _ = exported("llama-3", scheme)
    source, stored, reader = tensors(theirs.parent / "source"), tensors(theirs), HuggingFaceReader(theirs)
    others = total = 0
    for name, encoding in reader.encodings.items():
        weight, codes = source[name], stored[name]
        scale = encoding.scale_inv.float().expand(len(weight), 1)
        expected = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        ours = torch.empty_like(codes)
        encoding.encode_rows(weight, 0, ours, torch.empty(numerics.PIECE))
        assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8)), name
        others += int((codes.view(torch.uint8) != expected.view(torch.uint8)).sum())
        total += codes.numel()
    with capsys.disabled():
        print(f"\nModelOpt, {scheme}: {others / total:.2%} of codes are others than those of a division in FP32")
    assert others == 0 if scheme == "dynamic" else 0 < others < 0.1 * total


DECODE = Path(__file__).with_name("modelopt_decode.py")


@pytest.mark.parametrize("scheme", ["static", "dynamic", "block", "mxfp8"])
def test_its_directories_decode_to_what_it_says_itself_and_come_back(tmp_path, scheme):
    """FP32 products, so that nothing is rounded: bit for bit, ragged blocks too."""
    python = environments.modelopt()
    pico.save(tmp_path / "source", "llama-3", dtype=torch.bfloat16, **fp8_directories.RAGGED)
    subprocess.run([python, SCRIPT, tmp_path / "source", tmp_path / "fp8", scheme], check=True, capture_output=True)
    out = tmp_path / "expected.safetensors"
    subprocess.run([python, DECODE, tmp_path / "fp8", out], check=True, capture_output=True)
    expected, reader = load_file(out), HuggingFaceReader(tmp_path / "fp8")
    assert set(reader.encodings) == set(expected) and len(expected) == 14
    for name, values in expected.items():
        ours = reader.encodings[name].decode_rows(read_tensor(reader, name), 0)
        assert torch.equal(ours, values), name
    execute(plan_command(Request(tmp_path / "fp8", tmp_path / "megatron", "megatron")))
    execute(plan_command(Request(tmp_path / "megatron", tmp_path / "back", "hf", "fp8")))
    before, after = tensors(tmp_path / "fp8"), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and tensor.shape == after[name].shape
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), after[name].reshape(-1).view(torch.uint8)), name
    assert read(tmp_path / "back", "hf_quant_config.json") == read(tmp_path / "fp8", "hf_quant_config.json")
