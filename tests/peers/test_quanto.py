"""Directories that optimum-quanto saves: we decode the values that it makes of them."""

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

PACKAGES = ("optimum-quanto==0.2.7", "ninja==1.13.0")
SAVE = """
import sys
import torch
from optimum.quanto import QuantizedModelForCausalLM, qtypes
from optimum.quanto.nn import QModuleMixin
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
source, folder, kind, dtype = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
made = QuantizedModelForCausalLM.quantize(model, weights=qtypes[kind], exclude="lm_head")
modules = {name: each for name, each in model.named_modules() if isinstance(each, QModuleMixin)}
save_file({f"{name}.weight": each.weight.dequantize() for name, each in modules.items()}, f"{folder}/values")
made.save_pretrained(f"{folder}/saved")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quanto")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *PACKAGES]
    subprocess.run(command, check=True)
    return folder


@pytest.mark.parametrize(
    "settings", ["qint8 bfloat16", "qfloat8_e4m3fn bfloat16", "qint4 bfloat16", "qint4 float16", "qint2 float32"]
)
def test_what_quanto_saves_decodes_to_what_it_makes_of_it(tmp_path: Path, site: Path, settings: str) -> None:
    """In groups of 128 where there are more inputs, and in rows."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    pico.save(tmp_path / "bf16", dtype=torch.bfloat16, **sizes)
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SAVE, tmp_path / "bf16", tmp_path, *settings.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    saved = open_checkpoint(tmp_path / "saved")
    conversions.run(tmp_path / "saved", tmp_path / "values-bf16", "hf", workers=1)
    assert compare(saved, open_checkpoint(tmp_path / "values-bf16")).equal
    found, expected = (load_file(tmp_path / name) for name in ("values-bf16/model.safetensors", "values"))
    assert len(expected) >= 14
    for name, values in expected.items():
        assert torch.equal(found[name], values.bfloat16()), name
    assert saved.model == open_checkpoint(tmp_path / "bf16").model
