"""Directories that transformers saves with bitsandbytes: we decode the values that bitsandbytes computes with."""

import json
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
import json
import sys
import bitsandbytes, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
source, folder, settings = sys.argv[1:]
for name, said in json.loads(settings).items():
    config, dtype = BitsAndBytesConfig(**said), getattr(torch, said.get("bnb_4bit_compute_dtype", "bfloat16"))
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=dtype)
    model.save_pretrained(f"{folder}/{name}-saved")
    model, decoded = AutoModelForCausalLM.from_pretrained(f"{folder}/{name}-saved"), {}
    for module, layer in model.named_modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            values = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        elif isinstance(layer, bitsandbytes.nn.Linear8bitLt):
            values = bitsandbytes.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
        else:
            continue
        decoded[f"{module}.weight"] = values.contiguous()
    save_file(decoded, f"{folder}/{name}-values")
"""
SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
SETTINGS = {
    "nf4": NF4,
    "nf4-nested": NF4 | {"bnb_4bit_use_double_quant": True},
    "fp4-float16": NF4 | {"bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": "float16"},
    "nf4-stored-as-bfloat16": NF4 | {"bnb_4bit_quant_storage": "bfloat16"},
    "nf4-skipping": NF4 | {"llm_int8_skip_modules": ["lm_head", "q_proj"]},
    "int8": {"load_in_8bit": True},
}


@pytest.mark.parametrize("family", ["llama-3", "qwen3-moe"])
def test_what_transformers_saves_decodes_to_what_bitsandbytes_computes_with(tmp_path: Path, family: str) -> None:
    """Of a mixture transformers codes attention alone: its experts are no linears.

    Inputs are multiples of 64: of others, bitsandbytes 0.50.2's AVX-512 code gives blocks the absmaxes of others.
    """
    site = tmp_path / "bitsandbytes"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, WHEEL], check=True)
    pico.save(tmp_path / "bf16", family, dtype=torch.bfloat16, **SIZES)
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SAVE, tmp_path / "bf16", tmp_path, json.dumps(SETTINGS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    for name in SETTINGS:
        saved = open_checkpoint(tmp_path / f"{name}-saved")
        conversions.run(tmp_path / f"{name}-saved", tmp_path / f"{name}-bf16", "hf", workers=1)
        assert compare(saved, open_checkpoint(tmp_path / f"{name}-bf16")).equal
        found = load_file(tmp_path / f"{name}-bf16" / "model.safetensors")
        expected = load_file(tmp_path / f"{name}-values")
        assert len(expected) >= 6
        for key, values in expected.items():
            assert torch.equal(found[key], values.bfloat16()), (name, key)
        assert saved.model == open_checkpoint(tmp_path / "bf16").model
