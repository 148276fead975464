"""Several ranks on one conversion: the same bytes as one, one error for all of them, and going on."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import count
from pathlib import Path

import pico
import pytest
import torch
from command_line import run
from command_processes import CommandProcess
from conversions import tree
from forked import free_port
from soaking import few, in_soak
from torch.distributed import DistError, HashStore

import precisionctl.conversion.convert
import precisionctl.conversion.worker
from precisionctl.checkpoints.chunks import Chunked, write_rows
from precisionctl.checkpoints.hf_directory.huggingface_files import MAX_SHARD_SIZE
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.conversion.convert import parts_of_ranks
from precisionctl.conversion.ranks import NO_OTHERS, Ranks, _first_host, _port, from_environment
from precisionctl.errors import DataError, EnvironmentProblem, PrecisionctlError
from precisionctl.param import Layout, Parallelism
from precisionctl.trainer.parallel import world

SHARD = 60_000


def environments(count: int, names: tuple[str, str]) -> list[dict[str, str]]:
    rank, size = names
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    return [os.environ | where | {rank: str(number), size: str(count)} for number in range(count)]


def finish(processes: list[CommandProcess]) -> list[tuple[int | None, str, str]]:
    return [process.ended() for process in processes]


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("ranks")
    pico.save(top / "hf", dtype=torch.bfloat16)
    execute(plan_command(Request(top / "hf", top / "megatron", "megatron", "fp8")))
    return top / "megatron"


def convert(source: Path, destination: Path, workers: int = 1) -> list[str]:
    """One worker for each rank, as a second one takes longer than what there is to write, unless a worker is to die."""
    how = ["--max-shard-size", str(SHARD), "--verify", "--workers", str(workers)]
    return ["convert", str(source), str(destination), "--to", "hf", *how]


@pytest.mark.parametrize(
    "names",
    [("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), pytest.param(("RANK", "WORLD_SIZE"), marks=pytest.mark.soak)],
    ids=str,
)
def test_two_ranks_write_the_bytes_of_one(tmp_path: Path, megatron: Path, names: tuple[str, str]) -> None:
    alone = finish([CommandProcess(convert(megatron, tmp_path / "alone"), dict(os.environ))])
    assert alone[0][0] == 0, alone
    ends = finish([CommandProcess(convert(megatron, tmp_path / "two"), each) for each in environments(2, names)])
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "Wrote" in ends[0][1] and ends[1][1] == ""
    assert tree(tmp_path / "two") == tree(tmp_path / "alone")
    assert len(list((tmp_path / "two").glob("*.safetensors"))) > 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "two"]


def by_four(request: Request, store: HashStore) -> None:
    def convert_as(rank: int) -> None:
        ranks = Ranks(rank, 4, store)
        with ranks.together():
            execute(plan_command(request), ranks=ranks, workers=1)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(convert_as, range(4)))


def test_four_ranks_write_the_bytes_of_one_and_say_few_words_to_each_other(tmp_path: Path, megatron: Path) -> None:
    class Counting(HashStore):
        words = 0

        def set(self, name: str, value: str) -> None:
            self.words += not name.startswith("alive.")
            super().set(name, value)

    store = Counting()
    execute(plan_command(Request(megatron, tmp_path / "of-1", "hf", max_shard_size=SHARD)))
    by_four(Request(megatron, tmp_path / "of-4", "hf", max_shard_size=SHARD), store)
    assert tree(tmp_path / "of-4") == tree(tmp_path / "of-1")
    assert store.words == 4 + 3 * 3, "begun, finished, laid out and end; and of each other rank checked, found and bye"


REQUESTS = {
    "torch_dist": lambda source, out: Request(source, out, "megatron"),
    "by columns": lambda source, out: Request(source, out, "megatron", "bf16", "torch", parallelism=Parallelism(2)),
    "codes": lambda source, out: Request.export(source, out, "vllm"),
}


@pytest.mark.parametrize("name", few(REQUESTS, "by columns"))
def test_four_ranks_that_share_files_write_the_bytes_of_one_also_if_one_of_them_failed_on_the_way(
    tmp_path: Path, megatron: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precisionctl.conversion.convert, "CUT_AT", 1000)  # in the middle of rows, too
    request_of = REQUESTS[name]
    execute(plan_command(request_of(megatron, tmp_path / "one" / "model")))
    request, written = request_of(megatron, tmp_path / "four" / "model"), count()
    planned = plan_command(request)
    files = [file for part in parts_of_ranks(planned.plan, planned.writer, 4) for file in part]
    assert len(files) > len(set(files))

    def write_or_fail(target: Chunked, name: str, row: int, values: torch.Tensor) -> None:
        if next(written) == 8:
            raise OSError(errno.EIO, "Input/output error")
        write_rows(target, name, row, values)

    monkeypatch.setattr(precisionctl.conversion.worker, "write_rows", write_or_fail)
    with pytest.raises(PrecisionctlError, match="failed"):
        by_four(request, HashStore())
    assert any('"done": ["' in journal.read_text() for journal in (tmp_path / "four").rglob(".unfinished.*"))
    os.truncate(max(files, key=lambda file: file.stat().st_size), 0)
    written = count(8)  # no rank writes it again before one fails
    with pytest.raises(PrecisionctlError, match="failed"):
        by_four(request, HashStore())
    by_four(request, HashStore())
    assert tree(tmp_path / "four") == tree(tmp_path / "one")


@pytest.mark.parametrize("target, shard", [("hf", SHARD), ("hf", 10 * SHARD), ("megatron", MAX_SHARD_SIZE)])
def test_all_bytes_are_dealt_to_ranks_once_each_and_evenly(
    tmp_path: Path, megatron: Path, target: Layout, shard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precisionctl.conversion.convert, "CUT_AT", 64)
    command = plan_command(Request(megatron, tmp_path / "out", target, max_shard_size=shard))
    (alone,) = parts_of_ranks(command.plan, command.writer, 1)
    for ranks in (2, 4, len(alone) + 3):
        parts = parts_of_ranks(command.plan, command.writer, ranks)
        for file, whole in alone.items():
            assert [byte for part in parts for byte in part.get(file, ())] == list(whole)
        sizes = [sum(map(len, part.values())) for part in parts]
        assert max(sizes) <= 1.11 * sum(sizes) / ranks + 64


def test_a_file_is_not_cut_between_ranks_where_it_begins_or_ends_near_the_cut(tmp_path: Path, megatron: Path) -> None:
    command = plan_command(Request(megatron, tmp_path / "out", "hf", max_shard_size=1))  # a file for each tensor
    parts = parts_of_ranks(command.plan, command.writer, 2)
    assert not parts[0].keys() & parts[1].keys()


@pytest.mark.soak
def test_torchrun_itself_can_start_it(tmp_path: Path, megatron: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    command = [sys.executable, *launcher, "-m", "precisionctl", *convert(megatron, tmp_path / "two")]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    execute(plan_command(Request(megatron, tmp_path / "alone", "hf", max_shard_size=SHARD)), verify=True)
    assert tree(tmp_path / "two") == tree(tmp_path / "alone")


def test_what_stops_one_rank_stops_all_and_the_same_command_goes_on(tmp_path: Path, megatron: Path) -> None:
    broken = """
import errno
import json
from precisionctl.conversion import worker
def fail(*_): raise OSError(errno.EIO, "Input/output error")
worker.write_rows = fail
"""
    first, second = environments(2, ("RANK", "WORLD_SIZE"))
    arguments = convert(megatron, tmp_path / "two")
    ends = finish([CommandProcess(arguments, first), CommandProcess(arguments, second, broken)])
    assert [code for code, _, _ in ends] == [1, 1]
    assert "another rank failed: rank 1: the disk failed" in " ".join(ends[0][2].replace("│", " ").split())
    assert not (tmp_path / "two").exists()
    ends = finish([CommandProcess(arguments, each) for each in environments(2, ("RANK", "WORLD_SIZE"))])
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert open_checkpoint(tmp_path / "two").fp8 is not None


def test_a_rank_that_is_killed_can_be_started_again_with_the_others(tmp_path: Path, megatron: Path) -> None:
    dies = """
import os, signal
from precisionctl.conversion import worker
def die(*_): os.kill(os.getppid(), signal.SIGKILL)
worker.write_rows = die
"""
    first, second = environments(2, ("RANK", "WORLD_SIZE"))
    arguments = convert(megatron, tmp_path / "two", workers=2)
    waiting = CommandProcess(arguments, first)
    assert finish([CommandProcess(arguments, second, dies)])[0][0] == -signal.SIGKILL
    waiting.kill()  # as torchrun and srun do when a rank is gone
    waiting.ended()
    assert not (tmp_path / "two").exists()
    ends = finish([CommandProcess(arguments, each) for each in environments(2, ("RANK", "WORLD_SIZE"))])
    assert [code for code, _, _ in ends] == [0, 0], ends


@pytest.mark.parametrize("killed", [0, *in_soak(1)])
def test_a_rank_that_is_killed_is_noticed_by_the_one_that_waits(tmp_path: Path, megatron: Path, killed: int) -> None:
    impatient = "from precisionctl.conversion import ranks\nranks._BEAT, ranks._SILENCE = 0.2, 8.0\n"
    dies = """
import os, signal
from precisionctl.conversion import worker
def die(*_): os.kill(os.getppid(), signal.SIGKILL)
worker.write_rows = die
"""
    befores = [impatient + dies * (rank == killed) for rank in range(2)]
    arguments = convert(megatron, tmp_path / "two", workers=2)
    each = zip(environments(2, ("RANK", "WORLD_SIZE")), befores, strict=True)
    ends = finish([CommandProcess(arguments, environment, before) for environment, before in each])
    assert ends[killed][0] == -signal.SIGKILL
    told = " ".join(ends[1 - killed][2].replace("│", " ").split())
    assert ends[1 - killed][0] == 1
    assert ("rank 1 has not answered" if killed else "the other ranks are gone") in told
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_first_rank_shows_a_plan(
    tmp_path: Path, megatron: Path, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("precisionctl.conversion.estimate._copy_rate", lambda reader, directory: 1.0)
    dry_run = (*convert(megatron, tmp_path / "two"), "--dry-run")
    shown, whole = run(*dry_run), run(*dry_run, "--json")
    assert shown.exit_code == 0 and bool(shown.stdout) is (rank == "0")
    if rank == "0":
        plan = json.loads(whole.stdout)
        assert plan["estimate"]["seconds"] == 2 * plan["bytes"] / 2  # at a byte a second; --verify reads them back
        assert "memory of each rank" in shown.stdout and "if 2 ranks do not slow each other down" in shown.stdout


def test_slurm_says_where_the_first_rank_is() -> None:
    for nodes, host in (("node[003-010,021],login1", "node003"), ("a,b", "a"), ("gpu7", "gpu7")):
        assert _first_host({"SLURM_STEP_NODELIST": nodes}) == host
    ports = {_port({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": str(step)}) for step in range(3)}
    assert len(ports) == 3 and all(1024 < port < 65536 for port in ports)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE is 'two', not a number"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is '2', not a number from 0 to 1"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "-1"}, "SLURM_PROCID is '-1', not"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "abc"}, "MASTER_PORT is 'abc', not a number"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "65536"}, "MASTER_PORT is '65536', not"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "", "SLURM_JOB_ID": "1_2"}, "SLURM_JOB_ID is '1_2', not"),
    ],
)
def test_a_launcher_that_sets_no_number_is_told_which(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], told: str
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentProblem, match=re.escape(told)):
        from_environment()


def test_empty_variables_of_a_launcher_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.setenv(name, "")
    assert from_environment() is NO_OTHERS


@pytest.mark.soak
def test_a_signal_ends_the_wait_for_other_ranks() -> None:
    script = """
import os, signal, threading
from precisionctl.conversion import ranks
from precisionctl.signals import Terminated, stop_on_sigterm
import torch.distributed
signal.signal(signal.SIGTERM, signal.SIG_DFL)
stop_on_sigterm()
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
try:
    ranks.from_environment()
except Terminated:
    print("stopped")
"""
    first, _ = environments(2, ("RANK", "WORLD_SIZE"))
    done = subprocess.run([sys.executable, "-c", script], env=first, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr


def test_what_stops_one_rank_in_planning_stops_all(tmp_path: Path, megatron: Path) -> None:
    first, second = environments(2, ("RANK", "WORLD_SIZE"))
    elsewhere = convert(tmp_path, tmp_path / "two")  # no checkpoint is there
    ends = finish([CommandProcess(convert(megatron, tmp_path / "two"), first), CommandProcess(elsewhere, second)])
    assert [code for code, _, _ in ends] == [1, 1]
    told = " ".join(ends[0][2].replace("│", " ").split())
    assert "another rank failed: rank 1: there is no checkpoint in a known format" in told


def test_ranks_with_other_sources_are_refused(tmp_path: Path, megatron: Path) -> None:
    first, second = environments(2, ("RANK", "WORLD_SIZE"))
    other = convert(megatron.parent / "hf", tmp_path / "two")
    ends = finish([CommandProcess(convert(megatron, tmp_path / "two"), first), CommandProcess(other, second)])
    assert [code for code, _, _ in ends] == [1, 1]
    assert "rank 1 plans something else" in " ".join(ends[1][2].replace("│", " ").split())
    assert not (tmp_path / "two").exists()


def test_a_bias_that_must_be_zero_is_looked_at_by_one_of_the_ranks(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-attention-bias", dtype=torch.bfloat16)
    execute(plan_command(Request(tmp_path / "hf", tmp_path / "megatron", "megatron")))
    reader = open_checkpoint(tmp_path / "megatron")
    chunk = reader.chunks("decoder.layers.0.mlp.linear_fc1.bias")[0]
    assert isinstance(chunk.place, Path)
    with open(chunk.place, "r+b") as file:
        file.seek(chunk.offset)
        file.write(b"\x80\x3f")
    ends = finish(
        [
            CommandProcess(convert(tmp_path / "megatron", tmp_path / "two"), e)
            for e in environments(2, ("RANK", "WORLD_SIZE"))
        ]
    )
    assert [code for code, _, _ in ends] == [1, 1]
    assert "is not zero" in ends[0][2]


LOST = "[.../third_party/gloo/gloo/transport/tcp/pair.cc:538] Read error [127.0.0.1]:4711: Connection reset by peer"


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (DataError("empty", where="/home/igloo/data.txt"), DataError),
        (EnvironmentProblem("no gloo here"), EnvironmentProblem),
        (ValueError("gloom"), ValueError),
        (RuntimeError(LOST), EnvironmentProblem),
        (DistError(), EnvironmentProblem),
    ],
    ids=repr,
)
def test_only_what_pytorch_raises_in_a_collective_is_another_rank_s_end(
    error: Exception, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "from_environment", lambda: Ranks(1, 2, HashStore()))
    monkeypatch.setattr(Ranks, "together", lambda ranks: nullcontext())
    with pytest.raises(raised) as found, world.together():
        raise error
    assert (found.value is error) == (not isinstance(error, RuntimeError))
    if found.value is not error:
        assert "another rank ended without a message" in str(found.value)
