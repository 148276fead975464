"""Signals: SIGTERM stops the program as Ctrl-C does, and no worker outlives the process that it works for."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_PR_SET_PDEATHSIG = 1
"""Of Linux's <linux/prctl.h>."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: whatever answers Ctrl-C answers it, too."""


def stop_on_sigterm() -> None:
    """Raise Terminated in the main thread on the first SIGTERM, unless whoever started the program has it ignored. A
    second one kills. Only the program does this: in a library, signals belong to who uses it."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminate)


def terminate(number: int, frame: FrameType | None) -> None:
    """The program's handler of SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated


def name_of(stop: KeyboardInterrupt) -> str:
    """The signal that stopped the program: `SIGTERM` or `SIGINT`."""
    return "SIGTERM" if isinstance(stop, Terminated) else "SIGINT"


_STOPS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM wait. A process that is started here never gets them: a terminal, Slurm and torchrun
    send them to all processes, and the parent answers for all."""
    came: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _STOPS} if in_main else {}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # which a process that is started here inherits
    try:
        for number in handlers:  # the main thread answers what another one gets, whatever its own mask
            signal.signal(number, lambda number, frame: came.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for each in came:
            signal.raise_signal(each)


def ignore_until_the_end() -> None:
    """In the program, from now on SIGINT and SIGTERM stop nothing: its work is done, and what it prints and its exit
    code have to say so. While it ends, Python gives back SIGTERM's own meaning unless it is ignored, and unloading
    PyTorch takes a while."""
    if signal.getsignal(signal.SIGTERM) is terminate:
        for number in _STOPS:
            signal.signal(number, signal.SIG_IGN)


def end_with(parent: int) -> None:
    """On Linux, kill this process when its parent, the process `parent`, ends, whatever ends that: also if this process
    hangs in the file system, or is stopped. Strictly, when the parent's thread ends that has started this process."""
    if sys.platform == "linux":
        import ctypes  # for workers alone

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that call
            os.kill(os.getpid(), signal.SIGKILL)
