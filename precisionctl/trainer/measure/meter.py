"""Measure each update of a run: FLOPs, memory and FP8 health, the latter from the state of delayed scaling."""

import math
import re
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from precisionctl.codes.numerics import largest_code
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.measure.flops import bf16_peak
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.parallel.world import World


@dataclass(frozen=True)
class StepCost:
    """The cost of an update.

    `tflops` is TFLOP/s of the model on each device (`flops.py` says what counts), and `mfu_bf16` its share of the
    device's BF16 peak, also in FP8. `gpu_bytes` is the peak of allocated GPU memory in the update, `host_bytes` the
    peak of the process's resident memory so far, both of the rank with the most.

    `fp8_clipped` is the share of modules under delayed scaling for which the update's last pass clipped a tensor: an
    amax that would not even have been rounded to the largest code. `fp8_underflow` is the share for which the amax of
    some tensor was below the smallest normal code.
    """

    tflops: float
    mfu_bf16: float | None
    gpu_bytes: int | None
    host_bytes: int
    fp8_clipped: float | None = None
    fp8_underflow: float | None = None


@dataclass(frozen=True)
class PendingStepCost:
    """The part of an update's cost that the host knows while the device may still compute: FLOPs of each device, and
    memory."""

    flops: float
    peak: float | None
    gpu_bytes: int | None
    host_bytes: int

    @staticmethod
    def of(flops: float, world: World, device: torch.device) -> "PendingStepCost":
        """That of an update of so many FLOPs on all ranks, with the peak of GPU memory since it was reset. All-reduces
        a CPU tensor only, so that it does not wait for a device."""
        cuda = device.type == "cuda"
        allocated = torch.cuda.max_memory_allocated(device) if cuda else 0
        gpu_bytes, most = world.all_reduce_max(torch.tensor([allocated, host_bytes()])).tolist()
        return PendingStepCost(flops / world.count, _peak(device), gpu_bytes if cuda else None, most)

    def finish(self, seconds: float, fp8: Sequence[float]) -> StepCost:
        """The cost of an update that took this long; `fp8` is `Fp8Health.fractions`, empty if FP8 was not watched."""
        flops_per_second = self.flops / seconds
        clipped, underflow = fp8 or (None, None)
        return StepCost(
            tflops=flops_per_second / 1e12,
            mfu_bf16=flops_per_second / self.peak if self.peak else None,
            gpu_bytes=self.gpu_bytes,
            host_bytes=self.host_bytes,
            fp8_clipped=clipped,
            fp8_underflow=underflow,
        )


class Meter:
    """Measures a rank's part of the updates. All ranks call the same methods at the same time."""

    def __init__(self, model: GPT) -> None:
        self._model, self._world, self._device = model, model.backend.world, model.backend.device
        self._health = Fp8Health(model)
        self.flops = 0.0
        """Of the coming update, on all ranks."""

    def begin(self) -> None:
        """To be called before an update."""
        self._health.fractions = None
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    @contextmanager
    def last_pass(self) -> Iterator[None]:
        """A context for the update's last forward and backward pass, in which FP8 is watched."""
        if self._model.backend.recorder or not self._world.first:
            yield
        else:
            with self._health.watch():
                yield

    @property
    def health(self) -> Tensor | None:
        """`Fp8Health.fractions` of the update's last pass, on the device; None if FP8 was not watched."""
        return self._health.fractions


@cache
def _peak(device: torch.device) -> float | None:
    """As `bf16_peak`; None without a GPU. It is asked at each update, and the driver for a name only once."""
    return bf16_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def host_bytes() -> int:
    """The peak of this process's resident memory in bytes. (Linux's `ru_maxrss`, in KiB, is the parent's where that had
    more when it began this process; some systems, such as gVisor, say no more.)"""
    if sys.platform != "darwin":
        with suppress(OSError):
            if found := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
                return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class _Limits:
    """The limits for each watched scale, `[scales]`: the number of its module, int64; and, in units of codes, FP32, the
    largest code, the value beyond which clipping is a larger error than rounding, and the smallest normal number."""

    module: Tensor
    largest: Tensor
    clips: Tensor
    normal: Tensor


class Fp8Health:
    """Compares the amaxes of a pass with the scales that it was cast with. `fractions`, FP32 `[2]` on the model's
    device, is the last result: the fraction of modules that clipped, and of those that underflowed."""

    def __init__(self, model: GPT) -> None:
        self._linears = list(fp8_linears(model).values())
        self._recipe = model.precision.delayed
        self._limits: _Limits | None = None
        self.fractions: Tensor | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """A context for a forward and backward pass, after which `fractions` is that pass's."""
        if not self._linears:
            yield
            return
        before = self._scales()
        yield
        limits = self._limits = self._limits or self._make_limits()
        if self._recipe.amax_history_len == 1:  # its one row is zero between passes: derive the amaxes from the scales
            amaxes = limits.largest * 2.0**-self._recipe.margin / self._scales()
        else:
            views = [view for each in self._linears for _, view in each.fp8_views()]
            amaxes = torch.cat([view.amax_history[..., -1].reshape(-1) for view in views])
        codes = amaxes * before
        wrong = torch.stack([codes > limits.clips, (codes > 0) & (codes < limits.normal)]).float()
        by_module = wrong.new_zeros(2, len(self._linears)).index_add_(1, limits.module, wrong)
        self.fractions = (by_module > 0).float().mean(1)

    def _scales(self) -> Tensor:
        return torch.cat([view.scale.reshape(-1) for each in self._linears for _, view in each.fp8_views()])

    def _make_limits(self) -> _Limits:
        rows: list[tuple[float, ...]] = []
        for number, linear in enumerate(self._linears):
            for role, view in linear.fp8_views():
                dtype = self._recipe.dtype(role)
                largest, about = largest_code(dtype), torch.finfo(dtype)
                half_ulp = 2 ** math.floor(math.log2(largest)) * about.eps / 2
                rows += [(number, largest, largest + half_ulp, about.smallest_normal)] * view.scale.numel()
        module, largest_codes, clips, normal = torch.tensor(rows, device=self._scales().device).unbind(1)
        return _Limits(module.long(), largest_codes, clips, normal)
