"""The metrics file says every step once, whatever happened to the process that wrote it."""

import json
import math
import sys
import tracemalloc
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from precisionctl.errors import DataError, EnvironmentProblem
from precisionctl.recipe import Tracking
from precisionctl.reports.compare_runs import find_shadows
from precisionctl.reports.curves import read_curve, read_shadows
from precisionctl.trainer.measure import metrics
from precisionctl.trainer.measure.metrics import FILE, SHADOWS, MetricsLog, StepMetrics, read_metrics
from precisionctl.trainer.measure.tracking import require
from precisionctl.trainer.shadow import GradientSimilarity, Shadow


def step(number: int, loss: float = 1.0) -> StepMetrics:
    return StepMetrics(number, loss, 1e-3, 0.5, 100 * number, 1000.0, 0.1)


def write(folder: Path, after: int, *steps: StepMetrics) -> None:
    log = MetricsLog(folder, after, Tracking(), {})
    for one in steps:
        log.write(one)
    log.close()


def test_steps_beyond_the_one_resumed_from_are_dropped_with_a_line_that_a_kill_cut_short(tmp_path: Path) -> None:
    write(tmp_path, 0, step(1), step(2), step(3, loss=9.0))
    with open(tmp_path / FILE, "a") as file:
        file.write('{"step": 4, "lo')
    write(tmp_path, 2, step(3, loss=2.0))
    rows = [*read_metrics(tmp_path / FILE)]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_tokens_are_counted_on_from_the_step_resumed_from(tmp_path: Path) -> None:
    write(tmp_path, 0, step(1), step(2), step(3))
    log = MetricsLog(tmp_path, 2, Tracking(), {})
    assert log.tokens == 200
    log.close()


def test_what_was_not_measured_is_not_written(tmp_path: Path) -> None:
    write(tmp_path, 0, step(1))
    assert "held_out_loss" not in next(read_metrics(tmp_path / FILE))


def test_what_is_no_number_is_null_in_the_file_and_nan_to_whoever_reads_it(tmp_path: Path) -> None:
    likeness = GradientSimilarity(math.nan, math.inf)
    shadow = Shadow(2, math.nan, 1.0, likeness, {"a": likeness})
    broken = replace(step(2, loss=math.nan), grad_norm=math.inf, skipped=1, shadow=shadow)
    for after in (0, 2):  # again, as the start of a run that goes on writes what it keeps
        write(tmp_path, after, *([] if after else [step(1), broken]))
        lines = [(tmp_path / name).read_text().splitlines() for name in (FILE, SHADOWS)]
        written = [
            json.loads(each[-1], parse_constant=lambda word: pytest.fail(f"{word} is not JSON")) for each in lines
        ]
        assert written[0]["loss"] is written[0]["grad_norm"] is written[1]["gap"] is None
        assert written[1]["modules"] == {"a": [None, None]}
        row = [*read_metrics(tmp_path / FILE)][-1]
        assert math.isnan(row["loss"]) and math.isnan(row["grad_norm"]) and row["lr"] == 1e-3
        (row,) = read_shadows(tmp_path)
        assert math.isnan(row["gap"]) and row["loss_bf16"] == 1.0
    assert read_curve(tmp_path, "run").losses == {1: 1.0}
    shadows = find_shadows(tmp_path, "run")
    assert shadows and math.isnan(shadows.worst)


@pytest.mark.parametrize(
    "garbage", ["\0\0\0", "[1]", '{"step": 2}', '{"step": 2, "loss": "x", "tokens": 1}', "\ud800", "[" * 9999]
)
def test_a_line_that_is_no_step_s_is_one_clear_error_also_for_a_run_that_goes_on(tmp_path: Path, garbage: str) -> None:
    write(tmp_path, 0, step(1))
    with open(tmp_path / FILE, "a", encoding="utf-8", errors="surrogatepass") as file:
        file.write(garbage + "\n")
    for reading in (partial(read_curve, tmp_path, "run"), partial(MetricsLog, tmp_path, 1, Tracking(), {})):
        with pytest.raises(DataError, match="line 2 is not a step's metrics"):
            reading()


def test_tensorboard_events_are_written_beside(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, 0, step(1, loss=3.5), step(2, loss=2.5))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 3.5), (2, 2.5)]


def test_without_tensorboard_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    log = MetricsLog(tmp_path, 0, Tracking(), {})
    log.write(step(1))
    log.close()
    assert not (tmp_path / "tensorboard").exists() and len([*read_metrics(tmp_path / FILE)]) == 1


class FakeWandb(ModuleType):
    """What is used of wandb, as its documentation has it; it remembers."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **settings: Any) -> "FakeWandb":
        self.inits.append(settings)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    fake.__spec__ = ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_a_run_is_one_run_at_wandb_whatever_process_goes_on_with_it(tmp_path: Path, wandb: FakeWandb) -> None:
    folder = tmp_path / "my-run"
    folder.mkdir()
    for after, number in ((0, 1), (1, 2)):
        log = MetricsLog(folder, after, Tracking("project", offline=True), {"train": {"steps": 2}})
        log.write(step(number, loss=3.0))
        log.close()
    first, second = wandb.inits
    assert first == second and first["id"] and first["resume"] == "allow"
    assert (first["project"], first["name"], first["mode"]) == ("project", "my-run", "offline")
    assert first["settings"] == {"console": "off"}
    assert first["config"] == {"train": {"steps": 2}} and first["dir"] == str(folder)
    assert [(at, values["loss"]) for at, values in wandb.logged] == [(1, 3.0), (2, 3.0)]
    assert "step" not in wandb.logged[0][1] and wandb.finished == 2


def test_without_a_project_wandb_hears_nothing_and_with_one_it_must_be_there(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 0, step(1))
    assert not wandb.inits
    require(Tracking("project"))
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(EnvironmentProblem, match="wandb is not installed"):
        require(Tracking("project"))
    require(Tracking())


def test_no_more_than_a_line_of_a_long_file_is_in_memory_at_a_time(tmp_path: Path) -> None:
    lines = [json.dumps(step(number).as_dict()) + "\n" for number in range(1, 5001)]
    (tmp_path / FILE).write_text("".join(lines))
    tracemalloc.start()
    write(tmp_path, 4000)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 300_000 < (tmp_path / FILE).stat().st_size
    assert (tmp_path / FILE).read_text().splitlines() == [line.rstrip() for line in lines[:4000]]


def test_a_run_goes_on_however_long_its_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who read all of a file into memory are bounded."""
    write(tmp_path, 0, *map(step, range(1, 9)))
    monkeypatch.setattr(metrics, "_MAX_BYTES", 100)
    write(tmp_path, 7, step(8))
    with pytest.raises(DataError, match="not a file of less than 100 B"):
        list(read_metrics(tmp_path / FILE))
    assert len((tmp_path / FILE).read_text().splitlines()) == 8


def test_a_line_without_end_is_no_step_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_LONGEST_LINE", 1000)
    (tmp_path / FILE).write_text("1" * 2000)
    with pytest.raises(DataError, match="line 1 is not a step's metrics"):
        list(read_metrics(tmp_path / FILE))
