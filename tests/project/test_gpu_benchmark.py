"""`benchmarks/gpu.py` without a GPU: its sections run, and what fails in one is told and costs no other."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Barrier
from types import ModuleType

import pytest
import repository
import torch

sys.path.insert(0, str(repository.ROOT / "benchmarks"))

import convert
import gpu
from gpu_sections import casts, common, peers, products, profile, truth
from gpu_sections.common import Place
from gpu_sections.table import MAKERS, TITLES, tables

from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.errors import EnvironmentProblem
from precisionctl.precision import PRESETS, Precision

SMALL = Place(small=True)
NOT_ON_A_CPU = ("only supports per-tensor scaling for CPU", "aten::_scaled_mm_v2", "Invalid scaling configuration")
"""What PyTorch says of a product with a scale for each row, until 2.11, and for each block."""


@pytest.mark.soak
def test_a_section_that_fails_or_is_too_slow_is_told_with_the_rows_that_it_had() -> None:
    asked = (("no_such_section", True, 600, print), ("truth", True, 0.1, print))
    failed, slow = (gpu.run_section(*each) for each in asked)
    assert failed["ended"] == "failed with exit code 1"
    assert "ModuleNotFoundError" in failed["log"]
    assert slow["ended"] == "stopped after its 0.1 seconds"
    slow["rows"] = [{"module": "linear", "recipe": "bf16", "error": "RuntimeError: no memory", "trace": "from where"}]
    told = tables({"machine": {"gpu": "none"}, "sections": {"truth": slow}})
    assert "**truth stopped after its 0.1 seconds**" in told
    assert "- truth, linear, bf16: RuntimeError: no memory" in told
    assert "from where" not in told


SECTION = """
import sys, time
with open(sys.argv[sys.argv.index("--rows") + 1], "w") as rows:
    rows.write('{"a": "row"}\\n{"half of a r')
    rows.flush()
    time.sleep(1000)
"""


def test_rows_are_kept_while_a_section_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "section.py").write_text(SECTION)
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "section.py"))
    kept: list[dict] = []
    ended = gpu.run_section("any", True, 3, kept.append)
    assert [section["ended"] for section in kept] == ["cut off with the whole call"]
    assert kept[0]["rows"] == ended["rows"] == [{"a": "row"}]
    assert ended["ended"] == "stopped after its 3 seconds"


def test_a_call_ends_before_its_limit_and_keeps_each_section_as_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, kept = [], []

    def run_section(name: str, small: bool, seconds: float, keep: Callable[[dict], None]) -> dict:
        asked.append((name, round(seconds)))
        keep({"ended": "under way", "seconds": 0, "rows": [], "log": ""})
        kept.append({each: one["ended"] for each, one in json.loads(out.read_text())["sections"].items()})
        return {"ended": "complete", "seconds": 1, "rows": [], "log": ""}

    monkeypatch.setattr(gpu, "run_section", run_section)
    monkeypatch.setattr(gpu, "machine", lambda small: {})
    out = tmp_path / "gpu.json"
    result = gpu.measure(["speed", "truth"], out, True, 200)
    assert asked == [("truth", gpu.BUDGETS["truth"]), ("speed", 200)], (
        "a budget, or what is left; what measures no time first"
    )
    assert kept == [{"truth": "under way"}, {"truth": "complete", "speed": "under way"}]
    late = gpu.measure(["speed"], out, True, 5)
    assert late["sections"]["speed"]["ended"].startswith("not begun")
    assert json.loads(out.read_text()) == late and result != late


def test_sections_that_measure_no_time_run_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    met = Barrier(len(gpu.UNTIMED), timeout=60)  # which breaks if they run one after the other

    def run_section(name: str, *_: object) -> dict:
        if name in gpu.UNTIMED:
            met.wait()
        return {"ended": "complete", "seconds": 1, "rows": [], "log": ""}

    monkeypatch.setattr(gpu, "run_section", run_section)
    monkeypatch.setattr(gpu, "machine", lambda small: {})
    made = gpu.measure(list(gpu.BUDGETS), tmp_path / "gpu.json", True, 2000)
    assert made["sections"].keys() == gpu.BUDGETS.keys()


def test_calls_are_merged_and_a_section_that_got_further_is_kept() -> None:
    def result(gpu_name: str, **ended: str) -> dict:
        sections = {name: {"ended": how, "rows": [1]} for name, how in ended.items()}
        return {"machine": {"gpu": gpu_name}, "sections": sections}

    stopped = "stopped after its 60 seconds"
    made = gpu.merged([result("H200", speed="complete", casts=stopped), result("H200", truth="complete")])
    assert list(made["sections"]) == ["truth", "speed", "casts"]
    again = gpu.merged([made, result("H200", speed=stopped, casts="complete")])
    assert {section["ended"] for section in again["sections"].values()} == {"complete"}
    with pytest.raises(SystemExit, match="gpu is H200 and H100"):
        gpu.merged([made, result("H100")])


def test_tables_are_put_between_their_marks(tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text("before\n<!-- gpu -->\nold\n<!-- /gpu -->\nafter\n")
    convert.put_into(document, "gpu", "| \\1 new |")
    assert document.read_text() == "before\n<!-- gpu -->\n| \\1 new |\n<!-- /gpu -->\nafter\n"
    document.write_text("no place")
    with pytest.raises(SystemExit, match="no place for the tables"):
        convert.put_into(document, "gpu", "new")
    assert "<!-- gpu -->" in (gpu.ROOT / "docs" / "benchmarks.md").read_text()


def measured(section: ModuleType) -> list[dict]:
    rows: list[dict] = []
    section.measure(SMALL, rows.append)
    assert not [row for row in rows if "error" in row and not any(each in row["error"] for each in NOT_ON_A_CPU)]
    name = section.__name__.rpartition(".")[2]
    assert "|" in tables({"machine": {}, "sections": {name: {"ended": "complete", "rows": rows}}})
    return rows


def test_every_section_has_a_budget_a_title_and_a_table() -> None:
    folder = Path(products.__file__).parent
    modules = {file.stem for file in folder.glob("*.py")} - {"__init__", "common", "plain", "table"}
    assert gpu.BUDGETS.keys() == MAKERS.keys() == TITLES.keys() == modules


def test_the_calls_of_make_gpu_are_all_sections_and_each_has_time_for_its_own() -> None:
    calls = re.findall(r"gpu-\d: SECTIONS := (\S+)", (gpu.ROOT / "Makefile").read_text())
    sections = [call.split(",") for call in calls]
    assert sorted(sum(sections, [])) == sorted(gpu.BUDGETS)
    for each in sections:
        together = max((gpu.BUDGETS[name] for name in each if name in gpu.UNTIMED), default=0)
        assert together + sum(gpu.BUDGETS[name] for name in each if name not in gpu.UNTIMED) <= gpu.LIMIT


def test_a_recipe_that_the_machine_refuses_is_told_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def choose_backend(asked: str, precision: Precision) -> str:
        if precision == PRESETS["mxfp8"]:
            raise EnvironmentProblem("MXFP8 wants compute capability 10.0", do="Choose another scaling.")
        return asked

    assert common.recipes(SMALL, print) == common.RECIPES
    monkeypatch.setattr(common, "choose_backend", choose_backend)
    rows: list[dict] = []
    assert common.recipes(SMALL, rows.append) == tuple(name for name in common.RECIPES if name != "mxfp8")
    told = tables({"machine": {}, "sections": {"speed": {"ended": "complete", "rows": rows}}})
    assert told == "- speed, mxfp8: MXFP8 wants compute capability 10.0. Choose another scaling."


@pytest.mark.soak
def test_gemms_are_measured_on_a_cpu_too() -> None:
    rows = measured(products)
    found = {(row["by"], "error" in row) for row in rows if "by" in row}
    assert {by for by, _ in found} == {*products.PRODUCTS, "TE bf16", *(f"TE {recipe}" for recipe in common.RECIPES)}
    assert ("scaled_mm, a scale per block", True) in found
    attention = [(row["attention"], row["window"]) for row in rows if "attention" in row and row["seconds"] > 0]
    assert attention == [(by, window) for window in (None, 16) for by in ("rows", "packed rows")]


@pytest.mark.soak
def test_the_emulation_is_itself_to_the_bit() -> None:
    (replayed,) = (row for row in measured(truth) if row.get("of") == "replay")
    assert replayed["different"] == 0
    assert replayed["equal"] > 100


@pytest.mark.soak
def test_a_step_is_profiled_by_kinds_of_kernels() -> None:
    for row in (row for row in measured(profile) if "profile" in row):
        assert row["ms"]["GEMM"] > 0
        assert sum(row["ms"].values()) >= row["busy_ms"] * 0.99 > 0


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_qqtst_128x256_128x5_2x1_v_bz_coopA_TNN", "GEMM"),
        (
            "void cutlass::device_kernel<enable_3x_kernel_for_sm90<cutlass::gemm::kernel::Gemm>>",
            "GEMM",
        ),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(...)", "GEMM"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x64", "attention"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<bf16, fp8e4m3>", "norms"),
        ("void transformer_engine::detail::cast_transpose_general_kernel<...>", "casts and transposes"),
        ("void transformer_engine::unary_kernel<8, float, fp8e4m3>", "casts and transposes"),
        ("transformer_engine::delayed_scaling_recipe::amax_and_scale_update_impl::kernel_bulk", "casts and transposes"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<LpNormFunctor<float, NormType::L2>>", "optimizer"),
        ("void at::native::unrolled_elementwise_kernel<direct_copy, LoadWithCast<1>>", "copies and elementwise"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("Memcpy DtoD (Device -> Device)", "copies and elementwise"),
        ("_swiglu_gradient", "our kernels"),
        ("a kernel of tomorrow", "other"),
    ],
)
def test_kernels_are_of_the_kind_that_they_are(kernel: str, kind: str) -> None:
    assert profile.kind_of(kernel) == kind


def test_time_in_which_kernels_run_is_counted_once() -> None:
    assert profile.union([("a", 0, 10), ("b", 5, 7), ("c", 8, 12), ("d", 20, 21)]) == 13


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile's, in PyTorch 2.13
@pytest.mark.soak
def test_others_are_measured_beside_ours_and_one_that_is_not_there_is_told() -> None:
    rows = measured(peers)
    assert {*peers.OURS, *peers.PLAIN} <= {row.get("variant") for row in rows}
    assert {"shape": "tiny", "absent": "torchao"} in rows or peers.TORCHAO.keys() <= {r.get("variant") for r in rows}


@pytest.mark.parametrize("scheme", casts.BLOCKS)
def test_the_gpu_s_way_of_casting_makes_the_codes_of_an_export(tmp_path: Path, scheme: str) -> None:
    convert.write_model(tmp_path / "source", 512, 512, 1, 100)
    execute(plan_command(Request.export(tmp_path / "source", tmp_path / "export", "vllm", scheme)))
    row = casts.by_device(scheme, tmp_path / "source", tmp_path / "codes", 2, SMALL, tmp_path / "export")
    assert (row["equal"], row["different"]) == (7, 0)
    tensors = list(casts.stored(tmp_path / "source"))
    assert (tmp_path / "codes").stat().st_size == sum(one.size // (2 if one.is_cast else 1) for one in tensors)
    kept = next(one for one in tensors if not one.is_cast)
    with open(kept.file, "rb") as source, open(tmp_path / "codes", "rb") as made:
        source.seek(kept.start)
        made.seek(kept.target)
        assert source.read(kept.size) == made.read(kept.size)


@pytest.mark.parametrize("scheme", casts.BLOCKS)
def test_what_the_cores_do_is_a_task_of_the_benchmark_of_conversions(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(convert, "run_child", lambda task, *_: asked.append(task) or {})
    casts._by_cores(scheme, tmp_path, tmp_path, 1)
    assert asked[0] in convert.TASKS and asked[0].endswith(scheme)


def test_zeros_are_codes_too() -> None:
    codes, scale_inv = casts.coded(torch.zeros(130, 4, dtype=torch.bfloat16), (128, 128))
    assert scale_inv.tolist() == [[1.0], [1.0]] and not codes.float().any()
