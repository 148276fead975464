"""`benchmarks/gpu.py` without a GPU: its sections run, and what fails in one is told and costs no other."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import gpu
from gpu_sections import products, truth
from gpu_sections.common import Place
from gpu_sections.table import tables


def test_a_section_that_fails_or_is_too_slow_is_told_with_the_rows_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "BUDGETS", {"no_such_section": 60, "truth": 0.1})
    failed, slow = (gpu.run_section(name, small=True) for name in gpu.BUDGETS)
    assert failed["ended"] == "failed with exit code 1"
    assert "ModuleNotFoundError" in failed["log"]
    assert slow["ended"] == "stopped after its 0.1 seconds"
    slow["rows"] = [{"module": "linear", "recipe": "bf16", "error": "RuntimeError: no memory"}]
    told = tables({"machine": {"gpu": "none"}, "sections": {"truth": slow}})
    assert "**truth stopped after its 0.1 seconds**" in told
    assert "- truth, linear, bf16: RuntimeError: no memory" in told


def measured(section: ModuleType) -> list[dict]:
    rows: list[dict] = []
    section.measure(Place(small=True), rows.append)
    assert not [row for row in rows if "error" in row]
    name = section.__name__.rpartition(".")[2]
    assert "|" in tables({"machine": {}, "sections": {name: {"ended": "complete", "rows": rows}}})
    return rows


def test_gemms_are_measured_on_a_cpu_too() -> None:
    assert {row["by"] for row in measured(products)} >= {*products.PRODUCTS, *products.LINEARS.values()}


def test_the_emulation_is_itself_to_the_bit() -> None:
    (replayed,) = (row for row in measured(truth) if row.get("of") == "replay")
    assert replayed["different"] == 0
    assert replayed["equal"] > 100
