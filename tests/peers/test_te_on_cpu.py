"""`tests/gpu` over Transformer Engine's own Python, its kernels stood in for (`te_on_cpu.py`): every call is one that
TE takes, and every fact that is Python in TE is seen."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
WHEELS = ("transformer_engine==2.20.2", "einops", "pydantic")

NOT_STOOD_IN_FOR = {"get_fused_attn_backend", "Float8BlockQuantizer"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    for wheel in WHEELS:
        dependencies = [] if wheel == "pydantic" else ["--no-deps"]
        command = [sys.executable, "-m", "pip", "install", "-q", *dependencies, "--target", str(folder), wheel]
        subprocess.run(command, check=True)
    return folder


def test_what_needs_no_kernel_passes_without_a_gpu(site: Path) -> None:
    paths = (TESTS.parent, TESTS, site)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "te_on_cpu", str(TESTS / "gpu")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    skipped = set(re.findall(r"(\w+) is not stood in for", done.stdout))
    assert skipped <= NOT_STOOD_IN_FOR, skipped
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 75
