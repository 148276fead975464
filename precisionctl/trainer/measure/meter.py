"""What each update of a run takes: FLOPs, memory, and how its FP8 fares, from what delayed scaling keeps anyway."""

import math
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from precisionctl.fp8.numerics import FP8_MAX
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.data import Batch
from precisionctl.trainer.measure.flops import bf16_peak, training_flops
from precisionctl.trainer.model.gpt import GPT


@dataclass(frozen=True)
class Taken:
    """What an update took.

    `tflops` are those of the model a second, on each device (`flops.py` says what counts); `mfu_bf16` is their share of
    the device's BF16 peak, in FP8 too. `gpu_bytes` is the most that tensors took in the update, `host_bytes` the most
    that the process ever had resident, both of the rank with the most.

    Of the modules that delayed scaling casts for, `fp8_clipped` is the share in which the update's last pass clipped a
    tensor: an amax was so far beyond its scale that rounding would not have brought it back to the largest code.
    `fp8_underflow` is the share in which some tensor as a whole was below the smallest normal number.
    """

    tflops: float
    mfu_bf16: float | None
    gpu_bytes: int | None
    host_bytes: int
    fp8_clipped: float | None = None
    fp8_underflow: float | None = None


@dataclass(frozen=True)
class Metered:
    """An update, as far as the host knows of it while a device may still be at it: FLOPs of each device, and memory."""

    flops: float
    peak: float | None
    gpu_bytes: int | None
    host_bytes: int

    def taken(self, seconds: float, health: Sequence[float]) -> Taken:
        """What it took, having taken so long; `health` as `Fp8Health.shares`, if anything was seen."""
        a_second = self.flops / seconds
        clipped, underflow = health or (None, None)
        return Taken(
            tflops=a_second / 1e12,
            mfu_bf16=a_second / self.peak if self.peak else None,
            gpu_bytes=self.gpu_bytes,
            host_bytes=self.host_bytes,
            fp8_clipped=clipped,
            fp8_underflow=underflow,
        )


class Meter:
    """Measures a rank's part of the updates. All ranks call the same methods at the same time."""

    def __init__(self, model: GPT) -> None:
        self._model, self._world, self._device = model, model.backend.world, model.backend.device
        self._cuda = self._device.type == "cuda"
        self._peak = bf16_peak(torch.cuda.get_device_name(self._device)) if self._cuda else None
        self._health = Fp8Health(model)
        self._lengths: list[int] = []

    def begin(self) -> None:
        """Before an update."""
        self._lengths, self._health.shares = [], None
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def count(self, batches: Sequence[Batch]) -> None:
        """What the update goes through on this rank."""
        self._lengths += [length for batch in batches for length in batch.lengths]

    @contextmanager
    def last_pass(self) -> Iterator[None]:
        """A context for the update's last pass forward and backward, in which FP8 is watched."""
        if self._model.backend.recorder or not self._world.first:
            yield
        else:
            with self._health.watch():
                yield

    @property
    def health(self) -> Tensor | None:
        """What the update's last pass was seen to do in FP8, on the device: as `Fp8Health.shares`."""
        return self._health.shares

    def metered(self) -> Metered:
        """After an update. What ranks say to each other here is in memory, and waits for no device."""
        flops = training_flops(self._model.model, self._lengths)
        gpu = torch.cuda.max_memory_allocated(self._device) if self._cuda else 0
        done = self._world.sum_of_data(torch.tensor(float(flops), dtype=torch.float64))
        most = self._world.largest(torch.tensor([gpu, host_bytes()])).tolist()
        return Metered(float(done) / self._world.count, self._peak, most[0] if self._cuda else None, most[1])


def host_bytes() -> int:
    """The most that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True)
class _Limits:
    """What the watched scales are held against, each `[scales]`: the number of the scale's module, int64; and FP32, in
    units of codes, the largest code, the smallest value whose clipping errs more than rounding does, and the smallest
    normal number."""

    module: Tensor
    largest: Tensor
    clips: Tensor
    normal: Tensor


class Fp8Health:
    """Holds the amaxes of a pass against the scales that it cast with. `shares` is what was seen last, on the model's
    device, FP32 `[2]`: of modules that clipped, and of those that underflowed."""

    def __init__(self, model: GPT) -> None:
        self._linears = list(fp8_linears(model).values())
        self._recipe = model.precision.delayed
        self._limits: _Limits | None = None
        self.shares: Tensor | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """A context for a pass forward and backward; afterwards `shares` is what FP8 did in it."""
        if not self._linears:
            yield
            return
        before = self._scales()
        yield
        limits = self._limits = self._limits or self._find_limits()
        codes = self._newest(limits) * before
        wrong = torch.stack([codes > limits.clips, (codes > 0) & (codes < limits.normal)]).float()
        by_module = wrong.new_zeros(2, len(self._linears)).index_add_(1, limits.module, wrong)
        self.shares = (by_module > 0).float().mean(1)

    def _scales(self) -> Tensor:
        return torch.cat([view.scale.reshape(-1) for each in self._linears for _, view in each.fp8_views()])

    def _newest(self, limits: _Limits) -> Tensor:
        """Amaxes of the newest pass; a history of one row rests at zero, and then its scale tells."""
        if self._recipe.amax_history_len == 1:
            return limits.largest * 2.0**-self._recipe.margin / self._scales()
        views = [view for each in self._linears for _, view in each.fp8_views()]
        return torch.cat([view.amax_history[..., -1].reshape(-1) for view in views])

    def _find_limits(self) -> _Limits:
        rows: list[tuple[float, ...]] = []
        for number, linear in enumerate(self._linears):
            for role, view in linear.fp8_views():
                dtype = self._recipe.dtype(role)
                largest, about = FP8_MAX[dtype], torch.finfo(dtype)
                half_ulp = 2 ** math.floor(math.log2(largest)) * about.eps / 2
                rows += [(number, largest, largest + half_ulp, about.smallest_normal)] * view.scale.numel()
        module, largest_codes, clips, normal = torch.tensor(rows, device=self._scales().device).unbind(1)
        return _Limits(module.long(), largest_codes, clips, normal)
