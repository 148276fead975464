"""Directories that hqq saves, in its own file and in safetensors: we decode the values that it computes with."""

import os
import subprocess
import sys
from pathlib import Path

import conversions
import pico
import pytest
import torch
from safetensors.torch import load_file

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import UnknownFormat
from precisionctl.verify.compare import compare

PACKAGES = ("hqq==0.2.8.post1", "termcolor==3.3.0", "einops==0.8.2")
SAVE = """
import sys
import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from hqq.models.hf.base import AutoHQQHFModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
source, folder, bits, axis, dtype = sys.argv[1:]
dtype, config = getattr(torch, dtype), BaseQuantizeConfig(nbits=int(bits), group_size=64, axis=int(axis))
model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
AutoHQQHFModel.quantize_model(model, config, compute_dtype=dtype, device="cpu")
values = {f"{name}.weight": each.dequantize() for name, each in model.named_modules() if isinstance(each, HQQLinear)}
save_file(values, f"{folder}/values")
AutoHQQHFModel.save_quantized(model, f"{folder}/own")
loaded = AutoHQQHFModel.from_quantized(f"{folder}/own", compute_dtype=dtype, device="cpu")
AutoHQQHFModel.save_to_safetensors(loaded, f"{folder}/saved")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hqq")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    environment = os.environ | {"DISABLE_CUDA": "1"}
    subprocess.run([*command, "--target", folder, *PACKAGES], check=True, env=environment)
    return folder


@pytest.mark.parametrize(
    "settings", ["8 1 bfloat16", "4 1 bfloat16", "4 0 float16", "3 1 bfloat16", "2 0 float32", "1 1 bfloat16"]
)
def test_what_hqq_saves_decodes_to_what_it_computes_with(tmp_path: Path, site: Path, settings: str) -> None:
    """Its own file, which is a pickle, is not read, and the way that is told then gives what is."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    pico.save(tmp_path / "bf16", dtype=torch.bfloat16, **sizes)
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SAVE, tmp_path / "bf16", tmp_path, *settings.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    with pytest.raises(UnknownFormat, match="save_to_safetensors"):
        open_checkpoint(tmp_path / "own")
    saved = open_checkpoint(tmp_path / "saved")
    conversions.run(tmp_path / "saved", tmp_path / "values-bf16", "hf", workers=1)
    assert compare(saved, open_checkpoint(tmp_path / "values-bf16")).equal
    found, expected = (load_file(tmp_path / name) for name in ("values-bf16/model.safetensors", "values"))
    assert len(expected) >= 8
    for name, values in expected.items():
        assert torch.equal(found[name], values.bfloat16()), name
    assert saved.model == open_checkpoint(tmp_path / "bf16").model
