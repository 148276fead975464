"""Directories that sinq saves: we decode the values that it computes with."""

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
from precisionctl.verify.compare import compare

PACKAGES = ("sinq==0.2.0", "termcolor==3.3.0")
SAVE = """
import sys
import torch
from safetensors.torch import save_file
from sinq.patch_model import AutoSINQHFModel
from sinq.sinqlinear_hf import sinq_base_quant_config
from transformers import AutoModelForCausalLM
source, folder, bits, dtype = sys.argv[1:]
dtype, config = getattr(torch, dtype), sinq_base_quant_config(nbits=int(bits), group_size=64)
model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
AutoSINQHFModel.quantize_model(model, tokenizer=None, quant_config=config, compute_dtype=dtype, device="cpu")
modules = ((name, each) for name, each in model.named_modules() if type(each).__name__ == "SINQLinear")
save_file({f"{name}.weight": each.dequantize() for name, each in modules}, f"{folder}/values")
AutoSINQHFModel.save_quantized_safetensors(model, None, f"{folder}/saved")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sinq")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *PACKAGES]
    subprocess.run(command, check=True)
    return folder


@pytest.mark.parametrize("settings", ["8 bfloat16", "4 bfloat16", "4 float16", "3 bfloat16", "2 float16"])
def test_what_sinq_saves_decodes_to_what_it_computes_with(tmp_path: Path, site: Path, settings: str) -> None:
    """Its config.json says nothing of codes, and buffers of positions are among the weights."""
    pico.save(tmp_path / "bf16", dtype=torch.bfloat16, hidden_size=128, intermediate_size=192, head_dim=32)
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SAVE, tmp_path / "bf16", tmp_path, *settings.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    conversions.run(tmp_path / "saved", tmp_path / "values-bf16", "hf", workers=1)
    saved, result = (open_checkpoint(tmp_path / name) for name in ("saved", "values-bf16"))
    assert compare(saved, result).equal
    found, expected = (load_file(tmp_path / name) for name in ("values-bf16/model.safetensors", "values"))
    assert len(expected) == 14
    for name, values in expected.items():
        assert torch.equal(found[name], values.bfloat16()), name
    assert saved.model == open_checkpoint(tmp_path / "bf16").model
