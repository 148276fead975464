"""Our exports in vLLM's own config parser and weight loader. Its FP8 kernels need a GPU and are not run."""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import environments
import in_memory
import pico
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.fp8 import numerics, sidecar
from precisionctl.fp8.state import Fp8State
from precisionctl.inference import InferenceExport, plan_export
from precisionctl.work import execute

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
VLLM = ("--no-build-isolation", "--no-binary=vllm", "--no-deps", "vllm==0.33.0")
TOO_NEW = ("certifi",)
"""What vLLM asks for in a version of the last days, which not every index has yet: nothing here goes by it."""
WITHOUT_KERNELS = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": "0.33.0"}
WHOLE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "moe_intermediate_size": 128}
"""Of which every linear is whole blocks."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.fixture(scope="module")
def python():
    torch_version = torch.__version__.partition("+")[0]
    return environments.python_with(
        "vllm",
        (f"torch=={torch_version}", *BUILD),
        VLLM,
        environment=WITHOUT_KERNELS,
        without_dependencies="vllm",
        any_version=TOO_NEW,
    )


def parts(name):
    """The stored tensors that a parameter of vLLM is made of."""
    module, _, kind = name.rpartition(".")
    stem, _, last = module.rpartition(".")
    return [f"{stem}.{part}.{kind}" for part in FUSED.get(last, (last,))] if stem else [name]


def through_vllm(tmp_path, python, family, method, scheme):
    """The tensors of an export, and the parameters that vLLM made of them."""
    pico.save(tmp_path / "source", family, dtype=torch.bfloat16, **(WHOLE if scheme == "block" else {}))
    source = in_memory.with_state(HuggingFaceReader(tmp_path / "source"))
    in_memory.export(source, tmp_path / "exported", method, scheme)
    loaded, said = load_in_vllm(python, tmp_path / "exported", tmp_path / "loaded.safetensors")
    assert said["quantization"] == (f"{method}_mxfp8" if scheme == "mxfp8" else method)
    return load_file(tmp_path / "exported" / "model.safetensors"), loaded


def load_in_vllm(python, directory, out):
    """What vLLM made of a directory's tensors, and what it says of itself."""
    environment = os.environ | {"VLLM_TARGET_DEVICE": "cpu", "PYTHONPATH": ""}
    subprocess.run([python, SCRIPT, directory, out], check=True, capture_output=True, env=environment)
    with safe_open(out, "pt") as file:
        return load_file(out), file.metadata()


SPELLINGS = [
    *((method, scheme) for method in ("compressed-tensors", "modelopt") for scheme in ("static", "dynamic")),
    ("fp8", "block"),
]


@pytest.mark.parametrize("family", ["llama-3", "llama-tied", "llama-all-biases", "mistral"])
@pytest.mark.parametrize(("method", "scheme"), [*SPELLINGS, ("modelopt", "mxfp8")])
def test_vllm_loads_every_parameter_with_the_values_that_are_stored(tmp_path, python, family, scheme, method):
    stored, loaded = through_vllm(tmp_path, python, family, method, scheme)
    for name, values in loaded.items():
        expected = torch.cat([stored[part].reshape(-1).view(torch.uint8) for part in parts(name)])
        padded = values.contiguous().reshape(-1).view(torch.uint8)  # vLLM rounds the vocabulary up to 64
        assert torch.equal(padded[: len(expected)], expected), name
        assert not padded[len(expected) :].any(), name
    assert {part for name in loaded for part in parts(name)} == set(stored)


EXPERTS = {"mixtral": ("w1", "w3", "w2"), "qwen3-moe": ("gate_proj", "up_proj", "down_proj")}
ROUTED = re.compile(r"(.+\.experts)\.routed_experts\.(w13|w2)_(weight|weight_scale_inv|weight_scale|input_scale)")


def of_experts(name, count, family):
    """The stored tensors of a parameter of vLLM that holds all experts of a layer; of gate and up, vLLM keeps one input
    scale."""
    gate, up, down = EXPERTS[family]
    stem, part, kind = ROUTED.fullmatch(name).groups()
    names = (down,) if part == "w2" else (gate,) if kind == "input_scale" else (gate, up)
    return [f"{stem}.{expert}.{each}.{kind}" for expert in range(count) for each in names]


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize(
    ("method", "scheme"), [spelling for spelling in SPELLINGS if spelling != ("modelopt", "dynamic")]
)
def test_vllm_loads_experts_with_the_values_that_are_stored(tmp_path, python, family, method, scheme):
    stored, loaded = through_vllm(tmp_path, python, family, method, scheme)
    found = {name: values for name, values in loaded.items() if ROUTED.fullmatch(name)}
    assert found
    taken = set()
    for name, values in found.items():
        names = of_experts(name, len(values), family)
        expected = torch.cat([stored[each].reshape(-1).view(torch.uint8) for each in names])
        assert torch.equal(values.contiguous().reshape(-1).view(torch.uint8), expected), name
        taken |= set(names)
    ups = {name for name in stored if ".experts." in name and name.endswith(f".{EXPERTS[family][1]}.input_scale")}
    assert taken | ups == {name for name in stored if ".experts." in name}
    assert all(values.dtype == torch.float8_e4m3fn for name, values in found.items() if name.endswith("_weight"))


@pytest.mark.parametrize(
    ("target", "scheme"), [("vllm", "static"), ("vllm", "dynamic"), ("vllm", "block"), ("tensorrt-llm", "static")]
)
def test_vllm_casts_its_cache_with_the_scales_that_are_stored(tmp_path, python, target, scheme):
    """Beside blocks and in ModelOpt's spelling, under those scales in BF16."""
    pico.save(tmp_path / "hf", "llama-3", dtype=torch.bfloat16, **WHOLE)
    source = in_memory.with_state(HuggingFaceReader(tmp_path / "hf"))
    roles = {
        role: numerics.after_one_update(torch.tensor(amax), role, source.fp8.recipe)
        for role, amax in (("k", 3.3), ("v", 0.7))
    }
    caches = {f"decoder.layers.{layer}.self_attention.core_attention": Fp8State(roles) for layer in range(2)}
    sidecar.write(tmp_path / "hf" / sidecar.RELATIVE, replace(source.fp8, modules={**source.fp8.modules, **caches}))
    execute(plan_export(InferenceExport(tmp_path / "hf", tmp_path / "out", target, scheme, kv_cache="fp8")))
    loaded, said = load_in_vllm(python, tmp_path / "out", tmp_path / "loaded.safetensors")
    assert said["cache"] == ("auto" if scheme == "block" else "fp8_e4m3" if target == "tensorrt-llm" else "fp8")
    for layer in range(2):
        for kind, amax in (("k", 3.3), ("v", 0.7)):
            found = loaded[f"model.layers.{layer}.self_attn.attn.{kind}_scale"]
            assert found.float().item() == (torch.tensor(amax) / 448).to(found.dtype).item()
    assert {name.rpartition(".")[2] for name in loaded} >= {"k_scale", "v_scale"}
