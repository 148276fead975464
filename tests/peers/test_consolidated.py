"""Mistral's own files and Meta's: what mistral-inference and llama-models save and compute, transformers computes of
what is made of it."""

import json
import os
import subprocess
from pathlib import Path

import consolidated_files
import conversions
import environments
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

MISTRAL = {
    "dense": consolidated_files.DENSE,
    "experts": consolidated_files.EXPERTS,
    "images": consolidated_files.DENSE | {"vision_encoder": consolidated_files.VISION},
}
LLAMA = {
    "llama": (consolidated_files.META, 1),
    "llama in two": (consolidated_files.META | {"use_scaled_rope": True}, 2),
}


def test_a_model_computes_what_its_own_program_does(tmp_path: Path) -> None:
    program = Path(__file__).parent / "consolidated_save.py"
    command = [environments.native(), program, tmp_path, json.dumps({"mistral": MISTRAL, "llama": LLAMA})]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    ids = torch.arange(20)[None] * 7 % 128
    for name in (*MISTRAL, *LLAMA):
        made = tmp_path / f"{name} in hf"
        conversions.run(tmp_path / name, made, "hf")
        kind = AutoModelForImageTextToText if name == "images" else AutoModelForCausalLM
        model = kind.from_pretrained(made, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            np.testing.assert_allclose(model(ids).logits[0], np.load(tmp_path / name / "logits.npy"), atol=2e-4)
            if name != "images":
                continue
            size = consolidated_files.VISION["image_size"]
            image = torch.linspace(-1, 1, 3 * size * size).view(1, 3, size, size)
            found = model.get_image_features(pixel_values=image, image_sizes=torch.tensor([[size, size]]))
            features = found.pooler_output if hasattr(found, "pooler_output") else found
            np.testing.assert_allclose(features[0], np.load(tmp_path / name / "features.npy"), atol=2e-4)
