"""Tokenizers of tests, at work as those of checkpoints are."""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from transformers import PreTrainedTokenizerBase

from precisionctl.tokens import process as process_module
from precisionctl.tokens.process import Process
from precisionctl.tokens.tokenizer import Tokenizer


def files_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """What it is saved as."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


FORKING = """
import os, signal, socket, sys
sys.path[:] = sys.argv[2:]
sys.modules["torch"] = None
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from precisionctl.tokens import chat, safe_tokenizer, server
asked = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while fds := socket.recv_fds(asked, 1, 2)[1]:
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        asked.close()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        server.main(os.getppid())
        os._exit(0)
    for fd in fds:
        os.close(fd)
    asked.send(str(pid).encode())
"""


@cache
def forking(pid: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process, of this one, that has imported transformers; it forks itself for each two descriptors that it gets."""
    here, there = socket.socketpair()
    paths = [path or os.getcwd() for path in sys.path]
    command = [sys.executable, "-P", "-c", FORKING, str(there.fileno()), *paths]
    server = subprocess.Popen(command, pass_fds=[there.fileno()], env=os.environ | {"HF_HUB_OFFLINE": "1"})
    there.close()
    return server, here


class Forked:
    """What a Process asks of its Popen, of a process that begins without the second that imports take."""

    def __init__(self, *_: object, **__: object) -> None:
        asked, stdin = os.pipe()
        stdout, said = os.pipe()
        _, server = forking(os.getpid())
        socket.send_fds(server, [b"1"], [asked, said])
        self.pid = int(server.recv(20))
        self._handle: int | None = os.pidfd_open(self.pid)
        for fd in (asked, said):
            os.close(fd)
        self.stdin, self.stdout = os.fdopen(stdin, "wb", 0), os.fdopen(stdout, "rb", 0)

    def poll(self) -> int | None:
        """What it ended with, another process hears."""
        return 0 if self._handle is None or select.select([self._handle], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        if self._handle is not None:
            if not select.select([self._handle], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a tokenizer", timeout or 0)
            os.close(self._handle)
            self._handle = None
        return 0

    def kill(self) -> None:
        if self._handle is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)


@contextmanager
def shared_processes(most: int = 4) -> Iterator[None]:
    """Equal tokenizers share a process, but for those that work beside one another; the last few stay, and all of them
    are forked from one."""
    known: OrderedDict[Any, tuple[Process, Any]] = OrderedDict()
    load, one_at_a_time = Tokenizer._loaded, Lock()

    def loaded(self: Tokenizer) -> Any:
        beside = id(self) if self._one_core else None
        key = os.getpid(), (self.key, beside)  # a fork must not speak into its parent's pipe
        with one_at_a_time:
            if key not in known or not known[key][0].runs:
                of_it = load(self)
                assert self._process
                known[key] = self._process, of_it
            known.move_to_end(key)
            while len(known) > most:
                (pid, _), (process, _) = known.popitem(last=False)
                if pid == os.getpid():
                    process.close()
            self._process, of_it = known[key]
        return of_it

    def close(self: Tokenizer) -> None:
        self._process = None

    made = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    with (
        patch.object(Tokenizer, "_loaded", loaded),
        patch.object(Tokenizer, "close", close),
        patch.object(process_module, "subprocess", made),
    ):
        yield
    for (pid, _), (process, _) in known.items():
        if pid == os.getpid():
            process.close()
    if forking.cache_info().currsize:
        server, asked = forking(os.getpid())
        server.kill()
        server.wait()
        asked.close()
        forking.cache_clear()
