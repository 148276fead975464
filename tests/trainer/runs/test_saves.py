"""Saves while training goes on, and runs that are given a time: the same bytes, and nothing half done looks whole."""

import errno
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from training import contents, losses, make_place, run, settings

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.module import LiveModel, Snapshot
from precisionctl.cli import main
from precisionctl.errors import DiskProblem
from precisionctl.model.model_shape import ModelShape
from precisionctl.recipe import Train
from precisionctl.trainer import stopping
from precisionctl.trainer.measure.metrics import StepMetrics
from precisionctl.trainer.resume import resume
from precisionctl.trainer.saved import saving
from precisionctl.trainer.saved.run_folder import after_step
from precisionctl.trainer.stopping import Stop


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("saves"))


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    run(settings(place / "source", place / "text.txt", place / "whole", train__keep=9))
    return place / "whole"


def going_on(place: Path, out: Path, **changes: Any) -> Any:
    return settings(place / "source", place / "text.txt", out, train__async_save=True, train__keep=9, **changes)


def steps_of(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("iter_*"))


def test_every_checkpoint_that_was_written_meanwhile_has_the_bytes_of_one_that_was_waited_for(
    place: Path, whole: Path, tmp_path: Path
) -> None:
    run(going_on(place, tmp_path / "run"))
    assert losses(tmp_path / "run") == losses(whole)
    for step in (2, 4, 6):
        assert contents(tmp_path / f"run/iter_000000{step}") == contents(whole / f"iter_000000{step}")
    assert steps_of(tmp_path / "run") == steps_of(whole)


def test_training_goes_on_while_a_checkpoint_is_written_and_one_at_a_time_is(
    place: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is as slow as two steps take: the checkpoint of step 2 is written after the update of step 3, and the
    one of step 4 begins when it is there."""
    out, may_write, order = tmp_path / "run", threading.Event(), list[str]()
    sync = saving.LocalRows.sync

    def slow(rows: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert may_write.wait(60)
        sync(rows)
        order.append("written")

    def on_step(step: StepMetrics) -> None:
        order.append(f"step {step.step}")
        if step.step == 3:
            assert steps_of(out) == ["iter_0000002.partial"]
            may_write.set()
        if step.step == 5:
            assert "iter_0000002" in steps_of(out)

    monkeypatch.setattr(saving.LocalRows, "sync", slow)
    resume(going_on(place, out), lambda started: None, on_step)
    assert order[:3] == ["step 1", "step 2", "step 3"] and order.count("written") == 3
    assert contents(out / "iter_0000002") == contents(whole / "iter_0000002")


def test_a_full_disk_is_told_at_the_next_step_and_nothing_looks_whole(
    place: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, sync, count = tmp_path / "run", saving.LocalRows.sync, iter(range(9))

    def full(rows: Any) -> None:
        if next(count) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(rows)

    made, seen = going_on(place, out), list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(saving.LocalRows, "sync", full)
        stage = saving.PendingSave.stage.fget
        patch.setattr(saving.PendingSave, "stage", property(lambda going: going.thread.join() or stage(going)))
        with pytest.raises(DiskProblem, match="No space left on device"):
            resume(made, lambda started: None, lambda step: seen.append(step.step))
    assert seen == [1, 2, 3, 4, 5]
    assert steps_of(out) == ["iter_0000002", "iter_0000004.partial"]
    started, finished, _ = run(made)
    assert (started.step, finished.step) == (2, 6)
    assert contents(out / "iter_0000006") == contents(whole / "iter_0000006")
    assert steps_of(out) == ["iter_0000002", "iter_0000004", "iter_0000006"] and losses(out) == losses(whole)


def test_a_copy_is_not_what_is_trained_on_and_what_is_shared_is_copied_once() -> None:
    shared = torch.arange(6.0).view(2, 3)
    live = LiveModel(ModelShape.__new__(ModelShape), {"a": shared, "b": shared, "c": shared.bfloat16()})
    held = Snapshot.of(live)
    (a,), (b,), (c,) = (held.chunks(name) for name in "abc")
    assert a.place is b.place and isinstance(c.place, torch.Tensor) and c.place.dtype == torch.bfloat16
    shared.zero_()
    assert torch.equal(a.place, torch.arange(6.0).view(2, 3))  # type: ignore[arg-type]
    assert held.specs == live.specs and a.box == live.chunks("a")[0].box


def test_a_scalar_of_a_live_model_is_one_row() -> None:
    live = LiveModel(ModelShape.__new__(ModelShape), {"scale": torch.tensor(3.0)})
    assert torch.equal(read_tensor(Snapshot.of(live), "scale"), torch.tensor(3.0))
    assert torch.equal(read_tensor(live, "scale"), torch.tensor(3.0))


def test_a_run_that_is_out_of_time_saves_stops_and_goes_on(
    place: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, now = tmp_path / "run", [1000.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])

    def a_minute(step: StepMetrics) -> None:
        now[0] += 60

    made = going_on(place, out, time_limit=timedelta(minutes=3))
    finished = resume(made, lambda started: None, a_minute)
    assert (finished.step, finished.stopped, finished.checkpoint.name) == (3, "time limit", "iter_0000003")
    finished = resume(made, lambda started: None, a_minute)
    assert (finished.step, finished.stopped) == (6, None)  # at the last step there is nothing left to continue
    assert losses(out) == losses(whole)
    assert contents(out / "iter_0000006") == contents(whole / "iter_0000006")


@pytest.mark.parametrize(
    ("step", "asked", "decided"),
    [
        (1, None, (False, None)),
        (2, None, (True, None)),
        (3, "time limit", (True, "time limit")),
        (5, None, (True, None)),
        (5, "time limit", (True, None)),
    ],
)
def test_a_run_that_is_asked_to_stop_at_its_last_step_is_done(
    step: int, asked: Stop | None, decided: tuple[bool, Stop | None]
) -> None:
    """The loops of both engines ask this."""
    assert after_step(step, Train(steps=5, save_every=2), asked) == decided


def test_a_job_script_is_told_by_the_exit_code_and_a_line(place: Path, tmp_path: Path) -> None:
    made = going_on(place, tmp_path / "run")
    options = [f"--set={override}" for override in made.overrides]
    words = ["resume", made.checkpoint, "--precision=bf16", f"--data={made.data}", f"--out={made.out}", *options]
    stopped = CliRunner().invoke(main, [*map(str, words), "--time-limit=0:00:00"])
    assert stopped.exit_code == 75
    assert "Stopped by the time limit at step 1" in stopped.output and "The same command continues" in stopped.output
    assert "from step 0 to 6, weights only" in stopped.output
    again = CliRunner().invoke(main, [*map(str, words), "--time-limit=1:00:00"])
    assert again.exit_code == 0 and "from step 1 to 6, continued" in again.output
    refused = CliRunner().invoke(main, [*map(str, words), "--time-limit=55"])
    assert refused.exit_code == 2 and "is not hours, minutes and seconds" in refused.output
