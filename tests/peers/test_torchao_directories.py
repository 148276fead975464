"""Directories that transformers saves with torchao: we decode the values that torchao makes of them."""

import os
import subprocess
import sys
from pathlib import Path

import conversions
import pico
import pytest
import torch
from safetensors.torch import load_file

WHEEL = "torchao==0.18.0"
SAVE = """
import sys
import torch
from safetensors.torch import save_file
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
)
from torchao.utils import TorchAOBaseTensor
from transformers import AutoModelForCausalLM, TorchAoConfig
source, folder = sys.argv[1:]
group = PerGroup(32)
for name, config in {
    "float8": Float8WeightOnlyConfig(),
    "int8": Int8WeightOnlyConfig(),
    "int8-group": Int8WeightOnlyConfig(granularity=group),
    "intx": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group),
    "int8-intx": Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=group),
}.items():
    said = TorchAoConfig(config)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config=said)
    model.save_pretrained(f"{folder}/{name}-saved")
    loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/{name}-saved").state_dict()
    coded = {key: value.dequantize() for key, value in loaded.items() if isinstance(value, TorchAOBaseTensor)}
    save_file(coded, f"{folder}/{name}-values")
"""
NAMES = ("float8", "int8", "int8-group", "intx", "int8-intx")


@pytest.mark.parametrize("family", ["llama-3", "qwen3-moe"])
def test_what_transformers_saves_decodes_to_what_torchao_makes_of_it(tmp_path: Path, family: str) -> None:
    """Of a mixture transformers codes attention alone: its experts are no linears."""
    site = tmp_path / "torchao"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, WHEEL], check=True)
    pico.save(tmp_path / "bf16", family, dtype=torch.bfloat16, hidden_size=128, intermediate_size=192, head_dim=32)
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SAVE, tmp_path / "bf16", tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    for name in NAMES:
        conversions.run(tmp_path / f"{name}-saved", tmp_path / f"{name}-bf16", "hf", workers=1)
        found = load_file(tmp_path / f"{name}-bf16" / "model.safetensors")
        expected = load_file(tmp_path / f"{name}-values")
        assert len(expected) >= 8
        for key, values in expected.items():
            assert torch.equal(found[key], values), (name, key)
