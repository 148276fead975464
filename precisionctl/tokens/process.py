"""A separate Python process that works on files of strangers: queried through pipes, killed when it takes too long."""

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from precisionctl.errors import EnvironmentProblem
from precisionctl.signals import held
from precisionctl.sizes import size
from precisionctl.tokens.limits import Limits
from precisionctl.tokens.wire import Packet, receive, send

_BEGIN = "import sys; sys.path[:] = sys.argv[2:]; from precisionctl.tokens.server import main; main(int(sys.argv[1]))"
"""Uses the parent's `sys.path`, and does not import its `__main__`, as multiprocessing would."""

_STARTING = Limits(300.0, 0)
"""Time for imports, which are slow from a network disk."""

_PIECE = 1 << 16


class Ended(Exception):
    """The process has ended; the message says why, as the predicate of a sentence."""


class Process:
    """A process that runs `server.main`. Raises EnvironmentProblem if it does not start. With `one_core` the tokenizers
    library makes no threads."""

    def __init__(self, *, one_core: bool = False) -> None:
        environment = os.environ | {"HF_HUB_OFFLINE": "1"} | ({"TOKENIZERS_PARALLELISM": "false"} if one_core else {})
        paths = [path or os.getcwd() for path in sys.path]
        with tempfile.TemporaryFile() as errors:
            with held():
                self._popen = subprocess.Popen(
                    [sys.executable, "-P", "-c", _BEGIN, str(os.getpid()), *paths],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=environment,
                    bufsize=0,
                )
            assert self._popen.stdin and self._popen.stdout
            self._in, self._out = self._popen.stdin.fileno(), self._popen.stdout.fileno()
            os.set_blocking(self._in, False)
            try:
                self.answer(_STARTING, 0)
            except Ended as problem:
                errors.seek(0)
                last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
                raise EnvironmentProblem(f"the tokenizer's process does not start: {last or problem}") from None

    def ask(self, fields: Mapping[str, Any], parts: Sequence[bytes], limits: Sequence[Limits]) -> None:
        """Send a query that has one reply for each of the limits, to be fetched by `answer`. Raises Ended."""
        with self._within(limits[0]):
            send(self, {**fields, "limits": [asdict(each) for each in limits]}, parts)

    def answer(self, limits: Limits, most: int) -> Packet:
        """The next reply, of at most `most` bytes. Raises Ended if there is none in time."""
        with self._within(limits):
            return receive(self, most)

    def close(self) -> None:
        """Kill the process."""
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe:
                pipe.close()

    @property
    def runs(self) -> bool:
        """Whether the process is alive."""
        return self._popen.poll() is None

    @contextmanager
    def _within(self, limits: Limits) -> Iterator[None]:
        self._until = time.monotonic() + limits.seconds
        try:
            yield
        except TimeoutError:
            problem = f"takes longer than {limits.seconds:.0f} s"
        except ValueError as error:
            problem = f"answers with {error}"
        except (EOFError, BrokenPipeError):
            problem = self._last_words(limits)
        else:
            return
        self.close()
        raise Ended(problem)

    def _last_words(self, limits: Limits) -> str:
        try:
            code = self._popen.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "says no more"
        if code == -signal.SIGABRT:  # how Rust ends where there is no memory
            return f"asks for more than {size(limits.nbytes)} of memory"
        if code == -signal.SIGKILL:
            return "was killed, as the system does where memory runs out"
        if code == -signal.SIGXCPU:
            return f"takes longer than {limits.seconds:.0f} s of each core"
        if code < 0:  # real-time signals have no names in `signal.Signals`
            return f"ended by signal {-code} ({signal.strsignal(-code)})"
        return f"ended with exit code {code}"

    # The methods of wire.Pipe

    def read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait(self._out, select.POLLIN)
            piece = os.read(self._out, min(size - len(data), _PIECE))
            if not piece:
                break
            data += piece
        return bytes(data)

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            self._wait(self._in, select.POLLOUT)
            left = left[os.write(self._in, left[:_PIECE]) :]

    def flush(self) -> None:
        """Nothing to do: writes are not buffered."""

    def _wait(self, pipe: int, event: int) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        if not poll.poll(max(0.0, self._until - time.monotonic()) * 1000):
            raise TimeoutError
