"""`tests/gpu` over Transformer Engine's own Python, its kernels stood in for (`te_on_cpu.py`): every call is one that
TE takes, and every fact that is Python in TE is seen."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import te_core
import torch
from repository import GOLDEN, HELPERS, ROOT, TESTS
from safetensors.torch import load_file

WHEELS = ("transformer_engine==2.20.2", "einops", "pydantic")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    for wheel in WHEELS:
        dependencies = [] if wheel == "pydantic" else ["--no-deps"]
        command = [sys.executable, "-m", "pip", "install", "-q", *dependencies, "--target", str(folder), wheel]
        subprocess.run(command, check=True)
    return folder


def run(site: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = (ROOT, HELPERS, ROOT / "benchmarks", site)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done


def test_what_needs_no_kernel_passes_without_a_gpu(site: Path) -> None:
    done = run(site, "-m", "pytest", "-q", "-rs", "-p", "te_on_cpu", str(TESTS / "gpu"))
    assert "not stood in for" not in done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 150


def test_no_recipe_is_another_by_the_environment(site: Path) -> None:
    """Recipes have such variables as their defaults (common/recipe/__init__.py)."""
    others = {
        "NVTE_BACKWARD_OVERRIDE": "high_precision",
        "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1",
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
        "NVTE_NVFP4_DISABLE_RHT": "1",
        "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "1",
        "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "1",
        "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "1",
        "NVTE_NVFP4_4OVER6": "all",
    }
    recipes = str(TESTS / "gpu" / "test_te_recipes.py")
    run(site, "-m", "pytest", "-q", "-p", "te_on_cpu", "-k", "quantizers or backward", recipes, **others)


BENCHMARK = """
import json
import te_on_cpu
te_on_cpu.install()
from gpu_sections import common, curves, products, profile, speed, truth
common.Place.backend = property(lambda self: "te")
rows = []
for section in (truth, speed, profile, curves, products):
    section.measure(common.Place(small=True), rows.append)
print(json.dumps(rows))
"""


def test_the_benchmark_s_sections_run_on_te_s_own_python(site: Path) -> None:
    rows = json.loads(run(site, "-c", BENCHMARK).stdout.splitlines()[-1])
    assert not [row for row in rows if "error" in row and "scaled_mm, a scale per" not in row.get("by", "")]
    (replayed,) = (row for row in rows if row.get("of") == "replay")
    assert replayed["different"] == 0
    assert replayed["equal"] > 100
    refused = [row for row in rows if "refused" in row]
    assert [row["recipe"] for row in refused] == ["mxfp8", "nvfp4"] * 4, "as on Hopper; of curves there is one recipe"
    assert all("capability 10.0" in row["refused"] for row in refused)


def test_the_golden_file_of_nvfp4_is_what_te_s_reference_makes(site: Path, tmp_path: Path) -> None:
    run(site, str(GOLDEN / "nvfp4.py"), str(tmp_path / "made"))
    made, golden = (load_file(file) for file in (tmp_path / "made", GOLDEN / "nvfp4.safetensors"))
    assert made.keys() == golden.keys()
    for name, values in made.items():
        if name in ("y", "dgrad", "wgrad"):  # sums in an order that is the machine's
            torch.testing.assert_close(values, golden[name], rtol=2**-16, atol=2**-16)
        else:
            assert torch.equal(values.view(torch.uint8), golden[name].view(torch.uint8)), name


@pytest.fixture(scope="module")
def ranks(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `te_shared_layers.py` tells of all ranks."""
    file = tmp_path_factory.mktemp("ranks") / "told.json"
    run(site, str(HELPERS / "te_shared_layers.py"), str(file))
    return json.loads(file.read_text())


def test_data_ranks_on_te_s_own_python_start_fp8_cold_as_one_process_does(ranks: Any) -> None:
    """TE keeps no codes of a weight that FSDP2 cuts for the backward, and casts it again there: under the forward's
    scale, and recorded in the same row. As `test_tensor_parallel.py` holds the emulated ones."""
    assert len(ranks["data"]) == 2
    for rank in ranks["data"]:
        for found in (rank["kept"], rank["recomputed"]):
            assert found["losses"] == pytest.approx([0, 0], abs=2**-20)
            for told_of in ("scales", "histories", "at rest"):
                assert len(found[told_of]) == 8 * 5 and all(found[told_of].values()), told_of
            assert max(found["gradients"].values()) < 2**-7


def test_tensor_ranks_on_te_s_own_python_are_one_process_and_those_that_are_emulated(ranks: Any) -> None:
    """In FP32 as `test_tensor_parallel.py` holds the emulated ones; in FP8 against those. Under delayed scaling the
    first scales are 1, to which gradients of a thousandth are small: where sums have another order, codes are others.
    Forward amaxes are the same."""
    for rank in ranks["whole"]:
        assert len(rank) in (12, 3)
        for found in rank.values():
            assert abs(found["loss"]) < 2**-20 and abs(found["norm"]) < 2**-20 and not found["missing"]
            assert max(found["gradients"].values()) < 2**-17
    in_fp8 = {case: told for case, told in ranks.items() if "fp8" in case}
    assert len(in_fp8) == 6
    for case, told in in_fp8.items():
        for found in told:
            ours, theirs = found["losses"]
            assert theirs == pytest.approx(ours, rel=1e-6)
            assert found["gradients"] and max(found["gradients"].values()) < (2**-10 if "current" in case else 2**-4)
            assert len(found["amaxes"]) == (24 if "delayed" in case else 0)
            for name, share in found["amaxes"].items():
                assert share <= (2**-4 if name.endswith("grad_output") else 0), (case, name)


@pytest.mark.parametrize("family", te_core.FAMILIES)
def test_megatron_core_trains_on_te_s_own_python_from_recorded_state_and_goes_on(
    site: Path, tmp_path: Path, family: str
) -> None:
    """As the bundled trainer under delayed scaling, with gradients of the same size in the state that both share; and
    from what it has saved itself, to the last bit."""
    te_core.make(tmp_path, family)
    run(site, str(HELPERS / "te_core.py"), str(tmp_path))
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses["core"] == pytest.approx(losses["bundled"], rel=0.003)
    assert len(losses["on"]) == 3 and losses["core"][3:] == losses["on"]
    ratios = json.loads((tmp_path / "gradients.json").read_text())
    same = {name: ratio for name, ratio in ratios.items() if "experts" not in name}  # Megatron weighs inputs of these
    assert len(same) >= 4 and all(0.5 < ratio < 2 for ratio in same.values()), ratios


CORE = """
import json
import te_core
with te_core.on_cpu():
    from gpu_sections import common, core
    common.Place.backend = property(lambda self: "te")
    rows = []
    core.measure(common.Place(small=True), rows.append)
print(json.dumps(rows))
"""


def test_the_benchmark_measures_megatron_core_beside_ours(site: Path) -> None:
    rows = json.loads(run(site, "-c", CORE).stdout.splitlines()[-1])
    measured = [row["variant"] for row in rows if "tokens_per_second" in row]
    assert measured == ["bf16", "fp8-delayed", "Megatron-Core BF16", "Megatron-Core fp8-delayed"]


def test_ranks_that_share_experts_begin_with_the_state_of_theirs(site: Path, tmp_path: Path) -> None:
    """The source's is cut for one rank, and Megatron itself would put pieces of several experts into one."""
    te_core.make(tmp_path, "qwen3-moe")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run(site, *torchrun, str(HELPERS / "te_core.py"), str(tmp_path))
    for rank in range(2):
        same = json.loads((tmp_path / f"states.{rank}.json").read_text())
        assert len(same) == 8 and all(same.values()), same
