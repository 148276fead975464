"""What a host and its device tell each other without either waiting for the other: a GPU that waits for its host stands
still for as long as that takes to tell it what is next."""

import time

import torch
from torch import Tensor


def sent(values: Tensor, device: torch.device) -> Tensor:
    """What is in memory, on a device; the host goes on while it is copied."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class Coming:
    """Numbers `[n]` of a device, on their way into memory."""

    def __init__(self, numbers: Tensor) -> None:
        self._here = numbers.detach().to("cpu", non_blocking=True)
        self._there = Moment(numbers.device)

    def read(self) -> list[float]:
        """Wait for them."""
        self._there.wait()
        return [float(number) for number in self._here.tolist()]


class Moment:
    """When a device has done all that it was told until now."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._event:
            self._event.record()
        self._time = time.perf_counter()

    def wait(self) -> None:
        if self._event:
            self._event.synchronize()

    def until(self, later: "Moment") -> float:
        """Seconds; waits for the later one."""
        if self._event is None or later._event is None:
            return later._time - self._time
        later.wait()
        return float(self._event.elapsed_time(later._event)) / 1000
