"""Programs of tests, in processes of their own that are forked from one: what that has imported takes most of them
longer than what they do. PyTorch, transformers and what a run imports when it comes to it take five seconds of a core,
megatron-core takes five more."""

import gc
import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

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
        server = forking(os.getpid(), os.environ.get("PYTHONPATH", ""))
        assert server.stdin and server.stdout
        server.stdin.write(json.dumps({"text": text, "words": words, "imports": imports, "said": said.name}) + "\n")
        server.stdin.flush()
        code = server.stdout.readline().strip()
        assert code == "0", f"{words} ended with {code}: {said.read()[-4000:]}"


def word_for_soak(request: "pytest.FixtureRequest") -> list[str]:
    """`soak`, for a program that makes what the tests of a file need, if any that are asked for have this mark."""
    of_file = [item for item in request.session.items if item.path == request.path]
    return ["soak"] if any(item.get_closest_marker("soak") for item in of_file) else []


@cache
def forking(pid: int, paths: str) -> subprocess.Popen[str]:
    """The process, of this one, that forks itself for each program."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([paths, *sys.path] if paths else sys.path)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCHDYNAMO_DISABLE": "1"}
    command, pipe = [sys.executable, __file__], subprocess.PIPE
    server = subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe)
    servers.append(server)
    return server


servers: list[subprocess.Popen[str]] = []


@contextmanager
def forked_programs() -> Iterator[None]:
    """Ends what forks programs."""
    yield
    for server in servers:
        server.communicate()
    servers.clear()
    forking.cache_clear()


def serve() -> None:
    from precisionctl import architectures, checkpoints

    found = [*pkgutil.walk_packages(architectures.__path__, "precisionctl.architectures.")]
    found += pkgutil.walk_packages(checkpoints.__path__, "precisionctl.checkpoints.")
    for name in (*LATE, *(module.name for module in found)):
        importlib.import_module(name)
    for line in sys.stdin:
        asked = json.loads(line)
        for name in asked["imports"]:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # else each fork's collector writes into all that it shares with the others
        child = os.fork()
        if child == 0:
            run(asked["text"], asked["words"], asked["said"])
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


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


if __name__ == "__main__":
    serve()
