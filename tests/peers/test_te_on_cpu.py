"""`tests/gpu` over Transformer Engine's own Python, its kernels stood in for (`te_on_cpu.py`): every call is one that
TE takes, and every fact that is Python in TE is seen."""

import json
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


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = (TESTS.parent, TESTS, TESTS.parent / "benchmarks", site)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done


def test_what_needs_no_kernel_passes_without_a_gpu(site: Path) -> None:
    done = run(site, "-m", "pytest", "-q", "-rs", "-p", "te_on_cpu", str(TESTS / "gpu"))
    skipped = set(re.findall(r"(\w+) is not stood in for", done.stdout))
    assert skipped <= NOT_STOOD_IN_FOR, skipped
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 75


BENCHMARK = """
import json
import te_on_cpu
te_on_cpu.install()
from gpu_sections import common, curves, products, speed, truth
common.Place.backend = property(lambda self: "te")
rows = []
for section in (truth, speed, curves, products):
    section.measure(common.Place(small=True), rows.append)
print(json.dumps(rows))
"""


def test_the_benchmark_s_sections_run_on_te_s_own_python(site: Path) -> None:
    rows = json.loads(run(site, "-c", BENCHMARK).stdout.splitlines()[-1])
    errors = [row for row in rows if "error" in row and "not stood in for" not in row["error"]]
    assert not errors
    (replayed,) = (row for row in rows if row.get("of") == "replay")
    assert replayed["different"] == 0
    assert replayed["equal"] > 100
