"""Whole runs on Transformer Engine: a step is launched without a wait, and ends as it does otherwise."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training import contents, losses, make_place, make_text, settings

from precisionctl.trainer import loop
from precisionctl.trainer.resume import resume
from precisionctl.trainer.run import Run

pytestmark = pytest.mark.usefixtures("same_order")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_place(tmp_path_factory.mktemp("runs"))
    make_text(folder / "text.txt", words=5000)
    return folder


def run(place: Path, out: Path, **changes: Any) -> None:
    asked = {"train__save_every": 6, "train__batch_size": 4, "train__micro_batch_size": 2, "train__eval_every": 9}
    asked |= {"data__sequence_length": 128}
    made = settings(place / "source", place / "text.txt", out, changes.pop("precision", "fp8"), **asked | changes)
    resume(replace(made, backend="te"), lambda started: None, lambda step: None)


def numbers(out: Path) -> list[tuple[Any, ...]]:
    return [tuple((key, value) for key, value in row if key not in ("gpu_bytes", "mfu_bf16")) for row in losses(out)]


CASES: dict[str, dict[str, Any]] = {
    "BF16": {"precision": "bf16"},
    "delayed": {},
    "delayed, cast once": {"train__weight_casts": "per-update"},
    "current": {"precision__scaling": "current"},
}


@pytest.mark.parametrize("case", CASES)
def test_graphs_and_telling_late_change_nothing_and_nothing_is_waited_for(
    case: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second step on CUDA itself raises where the host would wait."""
    before = loop.update

    def update(run: Run) -> Any:
        torch.cuda.set_sync_debug_mode("error" if run.step > 1 else "default")
        try:
            return before(run)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    run(place, tmp_path / "graphs", train__graphs=True, **CASES[case])
    with monkeypatch.context() as watched:
        watched.setattr(loop, "update", update)
        run(place, tmp_path / "plain", **CASES[case])
    monkeypatch.setattr(loop, "reports_late", lambda run: False)
    run(place, tmp_path / "at once", **CASES[case])
    for other in ("graphs", "plain"):
        assert numbers(tmp_path / other) == numbers(tmp_path / "at once")
        tensors = [contents(tmp_path / name / "iter_0000006", "run.json") for name in (other, "at once")]
        assert tensors[0] == tensors[1]
