"""Directories that AutoRound saves: we decode the values that its own layers compute with. For AWQ's packing it has no
layer that runs on a CPU; tests/quant_methods/test_transposed_codes.py has what it makes of that."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pico
import torch
from safetensors.torch import load_file

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint

WHEELS = ("auto-round==0.16.1", "py-cpuinfo==9.0.0")
WAYS = {
    "own": (
        "auto_round",
        {"bits": 4, "group_size": 32, "sym": False},
        {"down_proj": {"bits": 8, "group_size": -1}, "q_proj": {"bits": 16}},
    ),
    "gptq": ("auto_round", {"bits": 4, "group_size": 32, "sym": True}, {}),
}
"""A format, arguments of AutoRound, and settings of layers. It packs symmetric codes as GPTQ's."""


def test_what_autoround_saves_decodes_to_what_its_layers_compute_with(tmp_path: Path) -> None:
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, *WHEELS], check=True)
    sizes = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32}
    pico.save(tmp_path / "bf16", "llama-3", dtype=torch.bfloat16, **sizes)
    program = Path(__file__).parent / "autoround_save.py"
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, program, tmp_path / "bf16", tmp_path, json.dumps(WAYS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    for way, packing in (("own", "auto_round"), ("gptq", "auto_round:auto_gptq")):
        reader, expected = open_checkpoint(tmp_path / f"{way}-saved"), load_file(tmp_path / f"{way}-values")
        said = json.loads((tmp_path / f"{way}-saved" / "config.json").read_text())["quantization_config"]
        assert said["packing_format"] == packing and len(expected) == (12 if way == "own" else 14)
        for name, values in expected.items():
            assert torch.equal(read_tensor(reader, name), values.bfloat16()), (way, name)
