"""Programs of tests, in processes of their own that are forked from a test process as it was before its first test:
what that has imported takes most of them longer than what they do. PyTorch, transformers and what a run imports when it
comes to it take five seconds of a core, megatron-core takes five more."""

import gc
import importlib
import json
import os
import pkgutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    import pytest

MEGATRON = tuple(
    f"megatron.core.{name}"
    for name in ("dist_checkpointing", "distributed", "models.gpt.gpt_layer_specs", "optimizer.distrib_optimizer")
)
LATE = (
    *("in_memory", "pico", "training", "torch.distributed.checkpoint._fsspec_filesystem"),
    *("torch.utils.serialization", "torch.utils.tensorboard"),
    *("precisionctl.cli", "precisionctl.console", "precisionctl.reports.run", "precisionctl.calibration.calibrate"),
    *("precisionctl.mcore.train_in_core", "precisionctl.trainer.resume", "precisionctl.trainer.backends.emulated"),
)
"""What runs and their programs import, at once or when they come to it, beside what registries look through."""


SECONDS = 900
"""A program that waits for ever is killed then: none takes three minutes on a slow machine."""


def run_program(program: Path | str, *arguments: object, imports: tuple[str, ...] = ()) -> None:
    """`python PROGRAM ARGUMENTS`, where it is a file of this folder, and `python -c PROGRAM ARGUMENTS`, where it is
    text; in a process that has these `imports` and those of any run already. Raises AssertionError if it fails."""
    with tempfile.NamedTemporaryFile("r") as said:
        text = program.read_text() if isinstance(program, Path) else program
        words = [str(program) if isinstance(program, Path) else "-c", *map(str, arguments)]
        (server,) = servers
        server.asked.write(json.dumps({"text": text, "words": words, "imports": imports, "said": said.name}) + "\n")
        server.asked.flush()
        code = server.told.readline().strip()
        assert code == "0", f"{words} ended with {code}: {said.read()[-4000:]}"


def word_for_soak(request: "pytest.FixtureRequest") -> list[str]:
    """`soak`, for a program that makes what the tests of a file need, if any that are asked for have this mark."""
    of_file = [item for item in request.session.items if item.path == request.path]
    return ["soak"] if any(item.get_closest_marker("soak") for item in of_file) else []


@dataclass(frozen=True)
class Server:
    """The process that forks itself for each program: what it is asked, and the exit codes that it tells, in lines."""

    pid: int
    asked: TextIO
    told: TextIO


servers: list[Server] = []


def fork_server() -> None:
    """Fork the server from this process, which has collected its tests and run none: it has a single thread of
    PyTorch's, and nothing that a test has changed."""
    (asked, ask), (told, tell) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            serve(asked, tell)
        finally:
            os._exit(1)
    os.close(asked)
    os.close(tell)
    servers.append(Server(pid, os.fdopen(ask, "w"), os.fdopen(told)))


@contextmanager
def forked_programs() -> Iterator[None]:
    """Ends what forks programs."""
    yield
    while servers:
        server = servers.pop()
        server.asked.close()
        server.told.close()
        os.waitpid(server.pid, 0)


def serve(asked: int, tell: int) -> None:
    """Fork a program for each line, until there are no more; no descriptor of the test process stays open."""
    with open(os.devnull, "r+b") as nothing:
        for number in (0, 1):
            os.dup2(nothing.fileno(), number)
    low, high = sorted((asked, tell))
    for first, end in ((3, low), (low + 1, high), (high + 1, os.sysconf("SC_OPEN_MAX"))):
        os.closerange(first, end)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # pytest's are closed
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.environ |= {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].config.disable = True
    warnings.simplefilter("ignore")
    with os.fdopen(asked) as lines, os.fdopen(tell, "w") as codes:
        for line in lines:
            import_what_runs_do()
            request = json.loads(line)
            for name in request["imports"]:
                importlib.import_module(name)
            gc.collect()
            gc.freeze()  # else each fork's collector writes into all that it shares with the others
            child = os.fork()
            if child == 0:
                run(request["text"], request["words"], request["said"])
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=codes, flush=True)
    os._exit(0)


@cache
def import_what_runs_do() -> None:
    """What registries look through, and what runs import when they come to it."""
    import torch

    from precisionctl import architectures, checkpoints

    torch.set_num_threads(1)
    modules = [*pkgutil.walk_packages(architectures.__path__, "precisionctl.architectures.")]
    modules += pkgutil.walk_packages(checkpoints.__path__, "precisionctl.checkpoints.")
    for name in (*LATE, *(module.name for module in modules)):
        importlib.import_module(name)


def run(text: str, words: list[str], said: str) -> None:
    """A forked process becomes the program; it ends here."""
    code = 1
    signal.alarm(SECONDS)
    with open(os.devnull, "r+b") as nothing, open(said, "wb") as file:
        for stream, number in ((nothing, 0), (nothing, 1), (file, 2)):
            os.dup2(stream.fileno(), number)
    try:
        sys.argv = words
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__file__ = words[0]
        exec(compile(text, words[0], "exec"), main.__dict__)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
