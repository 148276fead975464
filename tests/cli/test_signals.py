"""SIGTERM, as the program and its trainer answer it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from precisionctl.signals import Terminated, held, stop_on_sigterm, terminate
from precisionctl.trainer.stopping import stop_signals


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_the_first_sigterm_stops_and_a_second_one_kills() -> None:
    stop_on_sigterm()
    with pytest.raises(Terminated):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_sigterm_that_whoever_started_the_program_has_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stop_on_sigterm()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_run_notes_the_first_sigterm_and_the_system_answers_a_second_one() -> None:
    stop_on_sigterm()
    with stop_signals() as received:
        signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is terminate


def test_a_signal_that_another_thread_gets_waits_too() -> None:
    stop_on_sigterm()
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    reached = False
    try:
        with pytest.raises(Terminated), held():
            os.kill(os.getpid(), signal.SIGTERM)  # to the process: to the thread that does not block it
            time.sleep(0.05)
            reached = True
    finally:
        ended.set()
        other.join()
    assert reached and not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_signal_while_python_ends_does_not_change_the_exit_code() -> None:
    program = """
import os, signal
from precisionctl.__main__ import main
class Last:
    def __del__(self, kill=os.kill, this=os.getpid(), numbers=(signal.SIGINT, signal.SIGTERM)):
        for number in numbers:
            kill(this, number)
last = Last()
main()
"""
    ended = subprocess.run([sys.executable, "-c", program, "--version"], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("precisionctl")
