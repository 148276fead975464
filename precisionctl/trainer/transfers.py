"""Copies between host and GPU without waiting: while a host waits, it queues no work, and the GPU runs idle."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device; to CUDA from pinned memory, without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class AsyncRead:
    """Numbers `[n]` on a device, being copied to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._on_host = numbers.detach().to("cpu", non_blocking=True)
        self._copied = DeviceEvent(numbers.device)

    def read(self) -> list[float]:
        """Wait for the copy and return the numbers."""
        self._copied.wait()
        return [float(number) for number in self._on_host.tolist()]


class DeviceEvent:
    """The moment when a device has finished everything that is queued now; on a CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._event:
            self._event.record()
        self._time = time.perf_counter()

    def wait(self) -> None:
        """Wait until the device has got there."""
        if self._event:
            self._event.synchronize()

    def seconds_until(self, later: DeviceEvent) -> float:
        """Seconds between two events; waits for the later one."""
        if self._event is None or later._event is None:
            return later._time - self._time
        later.wait()
        return float(self._event.elapsed_time(later._event)) / 1000
