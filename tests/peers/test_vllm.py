"""Our exports in vLLM's own config parser and weight loader. Its FP8 kernels need a GPU and are not run."""

import os
import subprocess
from pathlib import Path

import environments
import in_memory
import pico
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from precisionctl.checkpoints.huggingface import HuggingFaceReader

SCRIPT = Path(__file__).with_name("vllm_load.py")
BUILD = (
    "setuptools<81",
    "setuptools_scm",
    "setuptools-rust",
    "wheel",
    "ninja",
    "cmake",
    "packaging",
    "jinja2",
    "numpy",
)
VLLM = ("--no-build-isolation", "--no-binary=vllm", "vllm==0.33.0")
WITHOUT_KERNELS = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": "0.33.0"}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.fixture(scope="module")
def python():
    torch_version = torch.__version__.partition("+")[0]
    return environments.python_with("vllm", (f"torch=={torch_version}", *BUILD), VLLM, environment=WITHOUT_KERNELS)


def parts(name):
    """The stored tensors that a parameter of vLLM is made of."""
    module, _, kind = name.rpartition(".")
    stem, _, last = module.rpartition(".")
    return [f"{stem}.{part}.{kind}" for part in FUSED.get(last, (last,))] if stem else [name]


@pytest.mark.parametrize("family", ["llama-3", "llama-tied", "llama-all-biases", "mistral"])
@pytest.mark.parametrize("scheme", ["static", "dynamic"])
@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt"])
def test_vllm_loads_every_parameter_with_the_values_that_are_stored(tmp_path, python, family, scheme, method):
    pico.save(tmp_path / "source", family, dtype=torch.bfloat16)
    source = in_memory.with_state(HuggingFaceReader(tmp_path / "source"))
    in_memory.export(source, tmp_path / "exported", method, scheme)
    out = tmp_path / "loaded.safetensors"
    environment = os.environ | {"VLLM_TARGET_DEVICE": "cpu", "PYTHONPATH": ""}
    subprocess.run([python, SCRIPT, tmp_path / "exported", out], check=True, capture_output=True, env=environment)
    with safe_open(out, "pt") as file:
        assert file.metadata()["quantization"] == method
    stored, loaded = load_file(tmp_path / "exported" / "model.safetensors"), load_file(out)
    for name, values in loaded.items():
        expected = torch.cat([stored[part].reshape(-1).view(torch.uint8) for part in parts(name)])
        padded = values.contiguous().reshape(-1).view(torch.uint8)  # vLLM rounds the vocabulary up to 64
        assert torch.equal(padded[: len(expected)], expected), name
        assert not padded[len(expected) :].any(), name
    assert {part for name in loaded for part in parts(name)} == set(stored)
