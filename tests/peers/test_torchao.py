"""torchao's float8 training beside ours, as `benchmarks/gpu.py` measures it: its GEMMs emulated, as it can."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WHEEL = "torchao==0.18.0"
SECTION = """
import json
from gpu_sections import peers
from gpu_sections.common import Place
rows = []
peers.measure(Place(small=True), rows.append)
print(json.dumps(rows))
"""
LINEAR = """
import torch
from gpu_sections import peers, plain
from gpu_sections.common import SMALL, Place
torch.manual_seed(0)
model = plain.Llama(SMALL[0], 1, fp8=False)
exact, tokens = model.layers[0].linears["fc1"], torch.randn(64, 128)
expected = exact(tokens)
peers.in_float8("tensorwise", False, Place(small=True), model)
found = model.layers[0].linears["fc1"](tokens)
print(float((found - expected).norm() / expected.norm()), type(model.output).__name__)
"""


def run(folder: Path, program: str) -> str:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks", folder)))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout.splitlines()[-1]


def test_every_way_of_torchao_makes_training_steps(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), WHEEL]
    subprocess.run(command, check=True)
    rows = json.loads(run(tmp_path, SECTION))
    assert not [row for row in rows if "error" in row or "absent" in row]
    assert len(rows) == 7 and all(row["tokens_per_second"] > 0 for row in rows)
    off, output = run(tmp_path, LINEAR).split()
    assert 2**-8 < float(off) < 2**-4, "linears of layers are in FP8"
    assert output == "Linear", "and the output layer is not"
