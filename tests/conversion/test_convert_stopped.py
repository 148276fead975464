"""A conversion that is killed, or meets a full disk or another run: nothing half-done, and the same command goes on."""

import errno
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import command_line
import pico
import pytest
import torch
from click.testing import CliRunner
from command_processes import CommandProcess
from conversions import assert_same_tensors, run, tree
from soaking import in_soak

from precisionctl import processes
from precisionctl.checkpoints import output
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.output import Output
from precisionctl.cli import main
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion import convert, journal, worker
from precisionctl.conversion.command import execute
from precisionctl.conversion.journal import open_journal, open_share_journal
from precisionctl.conversion.outcome import Outcome
from precisionctl.errors import CheckpointError, DiskProblem, OutputError

KILL = """
import os, signal, sys
from pathlib import Path
from precisionctl.checkpoints import output
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion import command, convert, worker
convert.SYNC_EVERY = 20_000
stage, source, destination = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
calls = 0
def count(function):
    def counted(*arguments, **named):
        global calls
        calls += 1
        if calls >= stage:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)
    return counted
worker.write_rows = count(worker.write_rows)
output.sync = count(output.sync)  # which the recorder of jobs calls, and the commit
command.execute(plan_command(Request(source, destination, "megatron", "fp8")), workers=1)
"""


@pytest.mark.parametrize("stage", [20, *in_soak(1, 40)])
def test_a_kill_leaves_nothing_that_looks_whole_and_the_same_command_goes_on(tmp_path: Path, stage: int) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "undisturbed", "megatron", precision="fp8")
    command = [sys.executable, "-c", KILL, str(stage), str(tmp_path / "hf"), str(tmp_path / "killed")]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert not (tmp_path / "killed").exists()
    assert (tmp_path / "killed.journal").exists()
    run(tmp_path / "hf", tmp_path / "killed", "megatron", precision="fp8")
    assert tree(tmp_path / "killed") == tree(tmp_path / "undisturbed")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "killed", "undisturbed"]


KILL_LATE = """
import os, signal, sys
from pathlib import Path
from precisionctl.cli import main
unlink = Path.unlink
def dying(path, missing_ok=False):
    if path.name.endswith(".journal"):
        os.kill(os.getpid(), signal.SIGKILL)
    unlink(path, missing_ok)
Path.unlink = dying
main(sys.argv[1:])
"""


def test_a_kill_after_the_last_rename_is_finished_by_the_same_command_and_by_no_other(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    same = ["convert", str(tmp_path / "hf"), str(tmp_path / "out"), "--to", "megatron"]
    assert subprocess.run([sys.executable, "-c", KILL_LATE, *same]).returncode == -signal.SIGKILL
    before = tree(tmp_path / "out")
    assert (tmp_path / "out.journal").exists()

    other = CliRunner().invoke(main, [*same, "--tp", "2"])
    assert other.exit_code == 1 and "DestinationExists" in other.stderr
    (tmp_path / "out.partial").mkdir()  # then what is at the destination came from elsewhere
    assert CliRunner().invoke(main, same).exit_code == 1
    (tmp_path / "out.partial").rmdir()

    again = CliRunner().invoke(main, same)
    assert again.exit_code == 0 and "Already done" in again.stdout
    assert tree(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]
    assert CliRunner().invoke(main, same).exit_code == 1  # as for every result that is there


LATE_SIGNALS = """
import os, signal
from precisionctl.checkpoints.output import Output
from precisionctl.signals import stop_on_sigterm
stop_on_sigterm()
commit = Output.commit
def commit_and_hear(output, **how):
    commit(output, **how)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
Output.commit = commit_and_hear
"""


@pytest.mark.soak
def test_a_signal_after_the_last_rename_stops_nothing(tmp_path: Path) -> None:
    """It would end by 75, which says that the same command continues."""
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    command = ["convert", str(tmp_path / "hf"), str(tmp_path / "out"), "--to", "megatron", "--workers", "1"]
    code, said, told = CommandProcess(command, os.environ, LATE_SIGNALS).ended()
    assert (code, said.startswith("Wrote")) == (0, True), told
    assert open_checkpoint(tmp_path / "out").specs


@pytest.mark.parametrize(
    "said",
    [
        b"[" * 100_000 + b"\n",
        b"7\n",
        b'{"plan": ' + b"9" * 5000 + b"}\n",
        b'{"plan": NaN, "id": [], "ranks": 1}\n',
        b'{"plan": "plan", "ranks": 1, "source": []}\n{"done": [[]], "found": {"a": "b"}}\n',
        b"\xff\x00\n",
    ],
)
def test_a_journal_that_is_none_is_refused_or_begun_anew(tmp_path: Path, said: bytes) -> None:
    output = Output(tmp_path / "out")
    output.begin()
    output.token.write_bytes(b"\xff")
    output.journal.write_bytes(said)
    try:
        with open_journal(output, "plan", [], ranks=1, restart=False) as kept:
            assert not kept.done and kept.outcome == Outcome()
    except OutputError as error:
        assert "another conversion" in str(error)


def test_another_number_of_ranks_is_told_so(tmp_path: Path) -> None:
    output = Output(tmp_path / "out")
    with open_journal(output, "plan", [], ranks=2, restart=False):
        pass
    with pytest.raises(OutputError, match="same conversion .* by 2 ranks instead of 3.*\n?.*Run it with 2 "):
        with open_journal(output, "plan", [], ranks=3, restart=False):
            pass
    with (
        pytest.raises(OutputError, match="another conversion"),
        open_journal(output, "another", [], ranks=3, restart=False),
    ):
        pass


def test_a_journal_of_holes_is_not_read(tmp_path: Path) -> None:
    output = Output(tmp_path / "out")
    output.journal.touch()
    os.truncate(output.journal, 1 << 40)
    with pytest.raises(OutputError, match="larger than"), open_journal(output, "plan", [], ranks=1, restart=False):
        pass


def test_a_worker_that_is_killed_is_one_error_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "undisturbed", "megatron")
    parent, write_rows = os.getpid(), worker.write_rows

    def killed(target: Any, name: str, row: int, values: torch.Tensor) -> None:
        if os.getpid() != parent and name == "decoder.layers.1.mlp.linear_fc1.weight":
            os.kill(os.getpid(), signal.SIGKILL)
        write_rows(target, name, row, values)

    with monkeypatch.context() as patch:
        patch.setattr(worker, "write_rows", killed)
        with pytest.raises(OutputError, match=r"exit code -9.*same command continues"):
            run(tmp_path / "hf", tmp_path / "out", "megatron", workers=2)
    assert not (tmp_path / "out").exists()
    run(tmp_path / "hf", tmp_path / "out", "megatron")
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


class Unspeakable(Exception):
    """An error that cannot be sent from one process to another."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("not to be pickled")


def test_an_error_that_a_worker_cannot_tell_is_an_error_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)

    def fails(*_: object) -> None:
        raise Unspeakable

    monkeypatch.setattr(worker, "write_rows", fails)
    with pytest.raises(RuntimeError, match="Unspeakable"):
        run(tmp_path / "hf", tmp_path / "out", "megatron", workers=2)
    assert not (tmp_path / "out").exists()


def test_jobs_are_recorded_together_while_others_are_done_and_a_slow_disk_holds_none_up() -> None:
    recorded, synced = list[list[str]](), threading.Event()

    def record(names: list[str], found: Outcome) -> None:
        recorded.append(names)
        synced.wait(20)

    plan = SimpleNamespace(job_bytes=lambda job: convert.SYNC_EVERY // 2)
    writer = SimpleNamespace(chunks=lambda name: ())
    jobs = (SimpleNamespace(name=str(number), outputs=()) for number in itertools.count())
    with convert._JournalWriter(plan, writer, SimpleNamespace(record=record)) as journaled:  # type: ignore[arg-type]
        time.sleep(0.05)  # the thread has begun, and has nothing to do
        until = time.monotonic() + 20
        while not recorded and time.monotonic() < until:
            journaled.add((next(jobs), Outcome()))  # type: ignore[arg-type]
            time.sleep(0.01)
        assert recorded[0][:2] == ["0", "1"]
        for _ in range(4):
            journaled.add((next(jobs), Outcome()))  # type: ignore[arg-type]
        assert time.monotonic() < until and len(recorded) == 1
        synced.set()
    assert [name for names in recorded for name in names] == [str(number) for number in range(int(next(jobs).name))]


def test_jobs_are_dealt_in_neighbouring_runs_of_about_equal_cost() -> None:
    for costs, shares in (([1] * 10, 2), ([5, 1, 1, 1, 1, 1], 2), ([], 3), ([7], 4), ([0, 0, 3], 2)):
        dealt = processes.deal(costs, shares)
        assert [number for share in dealt for number in share] == list(range(len(costs)))
        assert len(dealt) <= shares
    assert processes.deal([5, 1, 1, 1, 1, 1], 2) == [range(1), range(1, 6)]


def test_a_worker_whose_share_is_done_takes_from_another(tmp_path: Path) -> None:
    """The first item of the first share waits for its second one, which only the other worker can do."""

    def task(number: int) -> bool:
        (tmp_path / str(number)).touch()
        deadline = time.monotonic() + 20
        while number == 0 and not (tmp_path / "1").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return time.monotonic() < deadline

    results = dict(processes.in_processes(task, range(4), [1] * 4, 2))
    assert results == dict.fromkeys(range(4), True)


def test_going_on_does_not_write_again_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    monkeypatch.setattr(convert, "SYNC_EVERY", 1)
    written: list[str] = []
    write_rows = worker.write_rows

    def failing(target: Any, name: str, row: int, values: torch.Tensor) -> None:
        if name == "decoder.layers.1.mlp.linear_fc1.weight" and name not in written:
            written.append(name)
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(name)
        write_rows(target, name, row, values)

    monkeypatch.setattr(worker, "write_rows", failing)
    with pytest.raises(DiskProblem, match="run the same command again"):
        run(tmp_path / "hf", tmp_path / "out", "megatron", workers=1)
    assert not (tmp_path / "out").exists() and (tmp_path / "out.partial").exists()
    for path in ("out", "out.partial"):
        told = command_line.run("inspect", tmp_path / path)
        assert told.exit_code and "unfinished result" in told.stderr and "same command continues" in told.stderr
    first = [name for name in written if written.index(name) < written.index("decoder.layers.1.mlp.linear_fc1.weight")]
    written.clear()
    written.append("decoder.layers.1.mlp.linear_fc1.weight")
    notes = run(tmp_path / "hf", tmp_path / "out", "megatron", workers=1).notes
    assert not set(first) & set(written)
    assert any(re.fullmatch(rf"Continued: {len({*first})} of \d+ tensors were written before.", note) for note in notes)


def test_a_source_that_changed_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    fails = monkeypatch.context()
    with fails as patch:
        patch.setattr(worker, "write_rows", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(DiskProblem):
            run(tmp_path / "hf", tmp_path / "out", "megatron", workers=2)
    os.utime(tmp_path / "hf" / "model.safetensors")
    with pytest.raises(OutputError, match="same conversion .* source has changed since.*\n?.*--restart"):
        run(tmp_path / "hf", tmp_path / "out", "megatron")
    execute(plan_command(Request(tmp_path / "hf", tmp_path / "out", "megatron")), restart=True)
    assert (tmp_path / "out" / "release" / "metadata.json").is_file()


def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unfinished conversion at tmp_path/out, with all of its jobs in the journal."""
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(Output, "commit", lambda output, **how: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        with pytest.raises(DiskProblem):
            run(tmp_path / "hf", tmp_path / "out", "megatron")


def test_a_journal_is_not_believed_beside_another_partial_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(tmp_path, monkeypatch)
    shutil.rmtree(tmp_path / "out.partial")
    run(tmp_path / "hf", tmp_path / "out", "megatron")
    run(tmp_path / "out", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


@pytest.mark.parametrize("lose", [Path.unlink, lambda file: os.truncate(file, file.stat().st_size // 2)])
def test_a_file_that_was_lost_or_cut_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lose: Callable[[Path], None]
) -> None:
    stopped(tmp_path, monkeypatch)
    lose(tmp_path / "out.partial" / "release" / "__0_0.distcp")
    with monkeypatch.context() as patch:  # stopped again, when the file has its length but not its bytes
        patch.setattr(worker, "write_rows", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        with pytest.raises(DiskProblem):
            run(tmp_path / "hf", tmp_path / "out", "megatron")
    run(tmp_path / "hf", tmp_path / "out", "megatron")
    run(tmp_path / "out", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


@pytest.mark.parametrize("theirs", ["out.partial/thesis.txt", "out.journal"])
def test_what_is_not_ours_is_not_destroyed(tmp_path: Path, theirs: str) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    (tmp_path / theirs).parent.mkdir(exist_ok=True)
    (tmp_path / theirs).write_text("precious")
    for restart in (False, True):
        with pytest.raises(OutputError, match="no conversion has made it"):
            execute(plan_command(Request(tmp_path / "hf", tmp_path / "out", "megatron")), restart=restart)
        assert (tmp_path / theirs).read_text() == "precious"
        assert len(list(tmp_path.iterdir())) == 2


def test_a_restart_that_is_killed_leaves_nothing_of_what_it_discards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(tmp_path, monkeypatch)
    (tmp_path / "out.partial" / "stale.bin").write_bytes(b"of the run before")
    with monkeypatch.context() as patch:
        patch.setattr(Output, "begin", lambda output: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            execute(plan_command(Request(tmp_path / "hf", tmp_path / "out", "megatron")), restart=True)
    execute(plan_command(Request(tmp_path / "hf", tmp_path / "out", "megatron")), restart=True)
    assert not (tmp_path / "out" / "stale.bin").exists()


def test_two_runs_do_not_write_one_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "PATIENCE", 0.1)
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    work = plan_command(Request(tmp_path / "hf", tmp_path / "out", "megatron"))
    with open_journal(work.output, work.digest, work.files, ranks=1, restart=False):
        with pytest.raises(OutputError, match="another run"):
            execute(work)
        with pytest.raises(OutputError, match="another run"):
            execute(work, restart=True)


def test_a_torn_last_line_of_the_journal_is_ignored(tmp_path: Path) -> None:
    output = Output(tmp_path / "out")
    with open_journal(output, "plan", [], ranks=1, restart=False) as kept:
        kept.record(["a", "b"], Outcome(amax={"a": 1.5}, with_nan={"b"}))
    with open(output.journal, "a") as file:
        file.write('{"done": ["c"], "am')
    with open_journal(output, "plan", [], ranks=1, restart=False) as kept:
        assert kept.done == {"a", "b"} and kept.outcome == Outcome(amax={"a": 1.5}, with_nan={"b"})
        kept.record(["c"], Outcome())
    with open_journal(output, "plan", [], ranks=1, restart=False) as kept:
        assert kept.done == {"a", "b", "c"}


def test_a_source_that_changes_while_it_is_read_is_no_result(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    work = plan_command(Request(tmp_path / "hf", tmp_path / "out", "megatron"))
    with pytest.raises(OutputError, match="changed after it was opened"):
        execute(work, on_bytes=lambda count: os.utime(tmp_path / "hf" / "model.safetensors"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(OutputError, match="source has changed since"):
        run(tmp_path / "hf", tmp_path / "out", "megatron")
    work = plan_command(Request(tmp_path / "hf", tmp_path / "out", "megatron"))
    execute(work, restart=True)
    assert (tmp_path / "out").is_dir()


def test_a_source_that_has_changed_since_it_was_opened_is_not_read(tmp_path: Path) -> None:
    """Its headers are known from before, and the new file may have its tensors in another order."""
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    work = plan_command(Request(tmp_path / "hf", tmp_path / "out", "megatron"))
    os.utime(tmp_path / "hf" / "model.safetensors")
    for restart in (False, True):
        with pytest.raises(OutputError, match="changed after it was opened"):
            execute(work, restart=restart)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_rank_that_outlives_the_first_one_is_not_written_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens files by their paths, so what it planned would get into a new result at the same place."""
    monkeypatch.setattr(journal, "PATIENCE", 0.1)
    output = Output(tmp_path / "out")
    with open_journal(output, "plan", [], ranks=2, restart=False):
        other = open_share_journal(output, 1)
        other.__enter__()
    with (
        pytest.raises(OutputError, match="another run"),
        open_journal(output, "another plan", [], restart=True, ranks=1),
    ):
        pass
    assert output.share_journal(1).is_file()
    other.__exit__(None, None, None)
    with open_journal(output, "another plan", [], restart=True, ranks=1):
        assert not output.share_journal(1).exists()


def test_whatever_a_crash_leaves_in_the_journal_is_gone_on_from_or_refused(tmp_path: Path) -> None:
    output = Output(tmp_path / "out")
    with open_journal(output, "plan", [], ranks=1, restart=False) as kept:
        kept.record(["a"], Outcome())
    whole = output.journal.read_bytes()
    for junk in (b"\xff\x00\x85", b'{"done": ["\xff"], "found"', b"\x00" * 99 + b"\n", b"\xe2\x80\xa8\x1c\x0b\n"):
        output.journal.write_bytes(whole + junk)
        with open_journal(output, "plan", [], ranks=1, restart=False) as kept:
            assert kept.done == {"a"}
        assert output.journal.read_bytes() == whole
        output.journal.write_bytes(junk)
        with pytest.raises(OutputError, match="--restart"), open_journal(output, "plan", [], ranks=1, restart=False):
            pass
        assert output.journal.read_bytes() == junk
    with open_journal(output, "plan", [], restart=True, ranks=1) as kept:
        assert kept.done == set()
    of_another = b'{"id": "of another"}\n{"done": ["a"], "found": {}}\n'
    for junk in (b"{}\n", b'{"done": [], "found": {}}\n', of_another, b"\0"):
        output.share_journal(1).write_bytes(junk)
        with open_share_journal(output, 1) as kept:
            assert kept.done == set()
            kept.record(["b"], Outcome())
        with open_share_journal(output, 1) as kept:
            assert kept.done == {"b"}


def test_a_journal_of_a_share_that_is_too_large_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_MAX_BYTES", 1000)
    output = Output(tmp_path / "out")
    with open_journal(output, "plan", [], ranks=2, restart=False):
        output.share_journal(1).write_bytes(bytes(1001))
        with pytest.raises(OutputError) as refused, open_share_journal(output, 1):
            pass
    assert refused.value.where == str(output.share_journal(1))


def test_a_file_system_without_locks_is_told_from_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(output.fcntl, "flock", no_locks)
    with (
        pytest.raises(OutputError, match="has no locks"),
        open_journal(Output(tmp_path / "out"), "plan", [], ranks=1, restart=False),
    ):
        pass


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """With far more results than a pipe holds: a worker that nobody listens to must not wait for ever."""
    script = """
import os, signal
from precisionctl import processes
parent = os.getpid()
def task(number):
    print(os.getpid(), flush=True)
    return "x" * 100
results = processes.in_processes(task, range(20_000), [1] * 20_000, 2)
next(results)
os.kill(parent, signal.SIGKILL)
"""
    script = script.replace("    print(os.getpid(), flush=True)\n", "")
    killed = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    # the pipe's other end is open for as long as any worker lives
    assert killed.communicate(timeout=30)[0] == b"" and killed.returncode == -signal.SIGKILL


PROGRAM = """
import os, signal, sys, time
from precisionctl import __main__
from precisionctl.conversion import worker
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever the tests were started with
def held(*arguments):
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(600)
worker.write_rows = held
__main__.main()
"""


@pytest.mark.parametrize("kind", [signal.SIGTERM, *in_soak(signal.SIGKILL)])
def test_no_worker_outlives_a_command_that_is_stopped_or_killed(tmp_path: Path, kind: signal.Signals) -> None:
    """Even one that hangs in the file system, here one that is stopped; so the same command goes on at once."""
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    told = ["convert", str(tmp_path / "hf"), str(tmp_path / "out"), "--to", "megatron", "--workers", "2"]
    command = [sys.executable, "-c", PROGRAM, *told, "--precision", "fp8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout and running.stderr
        for line in (running.stdout.readline(), running.stdout.readline()):
            os.kill(int(line), signal.SIGSTOP)
        running.send_signal(kind)
        stopped = running.stderr.read()  # until the last worker has ended, too
    assert running.returncode == (75 if kind is signal.SIGTERM else -signal.SIGKILL)
    assert ("What is done is kept" in stopped) is (kind is signal.SIGTERM)
    assert not (tmp_path / "out").exists()
    assert CliRunner().invoke(main, [*told, "--precision", "fp8"]).exit_code == 0


def test_a_signal_to_all_processes_is_answered_by_the_parent_alone() -> None:
    """As Slurm and a terminal send it, here to the workers first."""
    script = """
import os, signal, time
from precisionctl import processes
from precisionctl.signals import Terminated, stop_on_sigterm
signal.signal(signal.SIGTERM, signal.SIG_DFL)
stop_on_sigterm()
parent = os.getpid()
def task(number):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    return number
print(len(list(processes.in_processes(task, range(8), [1] * 8, 2))))
def told(number):
    os.kill(parent, signal.SIGTERM)
    time.sleep(600)
try:
    list(processes.in_processes(told, range(8), [1] * 8, 2))
except Terminated:
    print("stopped")
os.kill(parent, signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "8\nstopped\n", "")


def test_a_full_disk_is_one_error_and_keeps_what_is_done(tmp_path: Path) -> None:
    """A real limit of the kernel's on file size, in a process of its own."""
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from precisionctl.commands import plan_command as c; from precisionctl.conversion import command as w\n"
        "work = c.plan_command(c.Request(Path(sys.argv[1]), Path(sys.argv[2]), 'megatron'))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n    w.execute(work)\nexcept w.DiskProblem as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "hf"), str(tmp_path / "out")]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "File too large" in output and "run the same command again" in output
    assert not (tmp_path / "out").exists() and (tmp_path / "out.journal").exists()
    run(tmp_path / "hf", tmp_path / "out", "megatron")


def test_a_source_that_cannot_be_read_is_one_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    before = tree(tmp_path / "hf")

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails)
        with pytest.raises(CheckpointError, match=r"not readable: Input/output error.*model.safetensors"):
            run(tmp_path / "hf", tmp_path / "out", "megatron")
    assert not (tmp_path / "out").exists() and tree(tmp_path / "hf") == before
    run(tmp_path / "hf", tmp_path / "out", "megatron")
