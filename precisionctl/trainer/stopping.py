"""What ends a run before its last step: a signal, the time limit, or too many skipped steps."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Literal

from precisionctl.errors import PrecisionError
from precisionctl.signals import terminate
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from precisionctl.trainer.parallel.world import World

Stop = signal.Signals | Literal["time limit"]

_OUT_OF_TIME = 1 << 10
"""Above every signal's number."""


def deadline(limit: timedelta | None) -> float:
    """When a run that begins now is to stop, by `time.monotonic`: after `limit`; never without one."""
    return time.monotonic() + (math.inf if limit is None else limit.total_seconds())


def agreed_stop(world: World, received: list[signal.Signals], until: float) -> Stop | None:
    """The reason to stop that any rank has, on all ranks: a signal, or its clock (`time.monotonic`) at `until`; None if
    there is none."""
    mine = _OUT_OF_TIME if time.monotonic() >= until else received[0] if received else 0
    number = int(world.all_reduce_max(torch.tensor(int(mine))))
    return "time limit" if number == _OUT_OF_TIME else signal.Signals(number) if number else None


def agreed_signal(world: World, received: list[signal.Signals]) -> signal.Signals | None:
    """As `agreed_stop`, without a time limit."""
    stop = agreed_stop(world, received, math.inf)
    return None if stop == "time limit" else stop


@contextmanager
def stop_signals() -> Iterator[list[signal.Signals]]:
    """Append the first SIGTERM or SIGINT to the list instead of dying of it; a second one has its usual effect. In
    another thread than the main one, which alone answers signals, nothing comes to the list."""
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)}

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        restore()
        if before[signal.SIGTERM] is terminate:  # in a collective no handler of Python's would run
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def restore() -> None:
        for kind, handler in before.items():
            signal.signal(kind, handler)

    for kind in before:
        signal.signal(kind, note)
    try:
        yield received
    finally:
        restore()


@dataclass
class SkippedSteps:
    """The number of steps that updated nothing because their loss or gradient norm was NaN or infinite: in `total`, and
    in a row since the last update (`running`). `updates` is the number of the others."""

    total: int = 0
    running: int = 0
    updates: int = 0

    def count(self, step: int, loss: float, norm: float, most: int) -> None:
        """Count a step. Raises PrecisionError after more than `most` skipped ones in a row."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.running = 0
            self.updates += 1
            return
        self.total += 1
        self.running += 1
        if self.running > most:
            running = f", the last of {self.running} skipped steps in a row" if most else ""
            do = (
                "These steps changed nothing. Lower optimizer.lr, or look at the newest checkpoint with "
                "`precisionctl inspect --fp8`; running again starts from it. train.max_skipped bounds how many there "
                "may be."
            )
            if not self.updates:  # the weights are still those of the beginning, whatever the rate
                do = (
                    "No step has changed anything yet. Are the weights finite? `precisionctl inspect --fp8` of the "
                    "checkpoint that the run begins from names those that are not."
                )
            raise PrecisionError(f"step {step} has loss {loss} and gradient norm {norm}{running}", do=do)
