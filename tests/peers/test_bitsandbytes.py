"""Directories that transformers saves with bitsandbytes: we decode the values that bitsandbytes computes with."""

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

WHEEL = "bitsandbytes==0.50.2"
SAVE = """
import sys
import bitsandbytes, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
source, saved, values, settings = sys.argv[1:]
said = eval(settings)
config = BitsAndBytesConfig(**said)
dtype = said.get("bnb_4bit_compute_dtype", torch.bfloat16)
AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=dtype).save_pretrained(saved)
model = AutoModelForCausalLM.from_pretrained(saved)
decoded = {}
for name, module in model.named_modules():
    if isinstance(module, bitsandbytes.nn.Linear4bit):
        decoded[name] = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
    elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
        decoded[name] = bitsandbytes.functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
save_file({f"{name}.weight": value.contiguous() for name, value in decoded.items()}, values)
"""
SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
SETTINGS = {
    "nf4": "dict(load_in_4bit=True, bnb_4bit_quant_type='nf4')",
    "nf4-nested": "dict(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True)",
    "fp4-float16": "dict(load_in_4bit=True, bnb_4bit_quant_type='fp4', bnb_4bit_compute_dtype=torch.float16)",
    "nf4-stored-as-bfloat16": "dict(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_quant_storage='bfloat16')",
    "nf4-skipping": "dict(load_in_4bit=True, bnb_4bit_quant_type='nf4', llm_int8_skip_modules=['lm_head', 'q_proj'])",
    "int8": "dict(load_in_8bit=True)",
}


@pytest.fixture(scope="module")
def bitsandbytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is installed; it builds its kernels for CPUs in."""
    folder = tmp_path_factory.mktemp("bitsandbytes")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), WHEEL]
    subprocess.run(command, check=True)
    return folder


@pytest.mark.parametrize("family", ["llama-3", "qwen3-moe"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_what_transformers_saves_decodes_to_what_bitsandbytes_computes_with(
    tmp_path: Path, bitsandbytes: Path, settings: str, family: str
) -> None:
    """Of a mixture transformers codes attention alone: its experts are no linears.

    Inputs are multiples of 64: of others, bitsandbytes 0.50.2's AVX-512 code gives blocks the absmaxes of others.
    """
    pico.save(tmp_path / "bf16", family, dtype=torch.bfloat16, **SIZES)
    arguments = [*map(str, (tmp_path / "bf16", tmp_path / "saved", tmp_path / "values")), SETTINGS[settings]]
    environment = os.environ | {"PYTHONPATH": str(bitsandbytes), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SAVE, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    conversions.run(tmp_path / "saved", tmp_path / "result", "hf", workers=1)
    assert compare(open_checkpoint(tmp_path / "saved"), open_checkpoint(tmp_path / "result")).equal
    found, expected = load_file(tmp_path / "result" / "model.safetensors"), load_file(tmp_path / "values")
    assert len(expected) >= 6
    for name, values in expected.items():
        assert torch.equal(found[name], values.bfloat16()), name
    assert open_checkpoint(tmp_path / "saved").model == open_checkpoint(tmp_path / "bf16").model
