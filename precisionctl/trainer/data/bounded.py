"""A bound on the time and memory of code that a stranger wrote and a sandbox runs."""

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/statm")


@contextmanager
def bounded(seconds: float, nbytes: int) -> Iterator[None]:
    """Python that runs inside gets a TimeoutError after `seconds`, and a MemoryError for more than `nbytes` beyond what
    is in use. Time is bounded in the main thread alone, which is where signals arrive; memory where Linux counts it.
    """
    with _time(seconds), _memory(nbytes):
        yield


@contextmanager
def _time(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _too_late)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    except _TooLate:
        raise TimeoutError("it takes too long") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _TooLate(BaseException):
    """No Exception: those jinja2 takes for a constant that it cannot work out beforehand, and goes on."""


def _too_late(*_: Any) -> None:
    raise _TooLate


@contextmanager
def _memory(nbytes: int) -> Iterator[None]:
    if not _STATUS.is_file():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = int(_STATUS.read_text().split()[0]) * resource.getpagesize() + nbytes
    known = [limit for limit in (soft, hard, most) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(known), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
