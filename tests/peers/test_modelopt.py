"""Our ModelOpt exports beside those that ModelOpt itself writes for the same model."""

import functools
import json
import subprocess
from pathlib import Path

import environments
import in_memory
import pico
import pytest
import torch
from safetensors.torch import load_file

from precisionctl.checkpoints.huggingface import HuggingFaceReader

SCRIPT = Path(__file__).with_name("modelopt_export.py")
VERSION = "0.47.0"
"""The version whose JSON quant_methods/modelopt.py writes."""


INSTALL = (*environments.OUR_VERSIONS, f"nvidia-modelopt=={VERSION}", "torch", "transformers", "requests", "datasets")
"""Its export imports requests and datasets, which are not among its own requirements."""

FAMILIES = ("llama-3", "llama-tied", "llama-all-biases", "mistral")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Makes ModelOpt's directory and ours for a family and a scheme, once each."""
    python = environments.python_with("modelopt", INSTALL)

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
