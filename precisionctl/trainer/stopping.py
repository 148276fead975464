"""What ends a run before its last step: a signal, or the time that it was given."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

import torch

from precisionctl.trainer.parallel.world import World

Stop = signal.Signals | Literal["time limit"]

_OUT_OF_TIME = 1 << 10
"""Above every signal's number."""


def agreed(world: World, received: list[signal.Signals], until: float) -> Stop | None:
    """What some rank has to stop for: a signal that it received, or its clock (`time.monotonic`) at `until`."""
    mine = _OUT_OF_TIME if time.monotonic() >= until else received[0] if received else 0
    number = int(world.largest(torch.tensor(int(mine))))
    return "time limit" if number == _OUT_OF_TIME else signal.Signals(number) if number else None


def agreed_signal(world: World, received: list[signal.Signals]) -> signal.Signals | None:
    """The same of what no time was given to."""
    stop = agreed(world, received, math.inf)
    return None if stop == "time limit" else stop


@contextmanager
def stop_signals() -> Iterator[list[signal.Signals]]:
    """The first SIGTERM or SIGINT lands in the list; a second one does what it always does."""
    received: list[signal.Signals] = []
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)}

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        restore()

    def restore() -> None:
        for kind, handler in before.items():
            signal.signal(kind, handler)

    for kind in before:
        signal.signal(kind, note)
    try:
        yield received
    finally:
        restore()
