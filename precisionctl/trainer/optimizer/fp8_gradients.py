"""Gradients in FP8 with one scale for each tensor, all-reduced as codes.

Peng et al., "FP8-LM: Training FP8 Large Language Models" (2023, arXiv 2310.18313), section 2.1. There NCCL sums codes
in FP8. Here an all-to-all sends each rank the codes of its part of every tensor, the rank sums their values in FP32,
and an all-gather sends the codes of the sum to all: as many bytes between ranks, and sums cannot overflow.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from precisionctl.codes.numerics import amax, code_values, current_scale, largest_code
from precisionctl.trainer.optimizer.scaled_tensor import ScaledTensor
from precisionctl.trainer.parallel.world import World

CODES = torch.float8_e4m3fn
BUCKET = 1 << 24
"""Most elements that ranks exchange at a time; a larger tensor is exchanged alone."""

SATURATED = 1e-5
"""If more than this share of the codes sent are the largest code, mu is halved."""

DOUBLED_IN = 1000
"""Otherwise mu grows so that it doubles in this many updates."""


class Fp8Gradients:
    """The gradients of an update as FP8 codes, by parameter (`held`). Ranks exchange codes of `mu` times their
    gradients; `mu` is the paper's auto-scaling factor."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """`parameters` are those that may have a gradient, with the same names and shapes on all ranks."""
        self.mu = 1.0
        self.held: dict[str, ScaledTensor] = {}
        self._parameters = parameters
        self._saturated: float | None = None

    def all_reduce(self, gradients: dict[str, Tensor], world: World) -> None:
        """Hold the sum over all ranks of gradients of any dtype. They are removed from `gradients` one by one, to free
        memory."""
        if world.count == 1:
            for name in [*gradients]:
                values = gradients.pop(name).float()
                scale = _scale(amax(values))
                self.held[name] = ScaledTensor(_encode(values, scale).view(CODES), scale.reciprocal()[None])
            return
        device = next(iter(self._parameters.values())).device
        none = torch.full((), -1.0, device=device)
        mine = [amax(gradients[name]) if name in gradients else none for name in self._parameters]
        largest = dict(zip(self._parameters, world.all_reduce_max(torch.stack(mine)), strict=True))
        buckets: list[list[str]] = []
        for name in [name for name, found in largest.items() if found >= 0]:
            in_bucket = sum(self._parameters[each].numel() for each in (*buckets[-1], name)) if buckets else math.inf
            if in_bucket > BUCKET:
                buckets.append([])
            buckets[-1].append(name)
        counts = torch.zeros(2, dtype=torch.int64, device=device)
        for names in buckets:
            zeros = {name: torch.zeros_like(self._parameters[name]) for name in names if name not in gradients}
            parts = [zeros[name] if name in zeros else gradients.pop(name) for name in names]
            amaxes = torch.stack([largest[name] for name in names])
            summed, count = _all_reduce_codes(parts, amaxes, world, self.mu)
            self.held |= zip(names, summed, strict=True)
            counts += count
        saturated, codes = world.all_reduce_sum(counts).tolist()
        self._saturated = saturated / max(1, codes)

    def end_update(self) -> None:
        """Drop the gradients of an update, and adapt mu for the next one."""
        if self._saturated is not None:
            self.mu *= 0.5 if self._saturated > SATURATED else 2 ** (1 / DOUBLED_IN)
        self.clear()

    def clear(self) -> None:
        """Drop the gradients, as if there had been none."""
        self.held, self._saturated = {}, None

    def norm(self) -> Tensor:
        """The norm of all gradients together, FP32 `[]`."""
        norms = [held.read().norm() for held in self.held.values()]
        return torch.stack(norms).norm() if norms else next(iter(self._parameters.values())).new_zeros(()).float()

    def scale_by(self, factor: Tensor) -> None:
        """Multiply all gradients by a factor `[]`; only the scales change."""
        for held in self.held.values():
            held.scale_inv.mul_(factor)


def _all_reduce_codes(
    parts: Sequence[Tensor], largest: Tensor, world: World, mu: float
) -> tuple[list[ScaledTensor], Tensor]:
    """The sums of tensors over all ranks; `largest` `[tensors]` are their amaxes over all ranks. Also how many of the
    codes that this rank has sent are the largest code, and how many it has sent: int64 `[2]`."""
    ends = list(itertools.accumulate(part.numel() for part in parts))
    places = [slice(end - part.numel(), end) for part, end in zip(parts, ends, strict=True)]
    each = -(-ends[-1] // world.count)  # elements that a rank sums; the last rank's are padded with zeros
    here = [slice(*(min(max(at - world.rank * each, 0), each) for at in (place.start, place.stop))) for place in places]

    scales = mu * _scale(largest)
    codes = torch.zeros(each * world.count, dtype=torch.uint8, device=largest.device)
    for part, place, scale in zip(parts, places, scales, strict=True):
        codes[place] = _encode(part.flatten(), scale)
    total = code_values(world.all_to_all(codes.view(world.count, each)).view(CODES)).sum(0)
    for place, scale in zip(here, scales, strict=True):
        total[place] *= scale.reciprocal()

    amaxes = [total[place].abs().amax() if place.start < place.stop else total.new_zeros(()) for place in here]
    # NaN as infinity, as a maximum over ranks may ignore NaN
    scales = _scale(world.all_reduce_max(torch.stack(amaxes).nan_to_num(nan=torch.inf)))
    mine = torch.zeros(each, dtype=torch.uint8, device=largest.device)
    for place, scale in zip(here, scales, strict=True):
        mine[place] = _encode(total[place], scale)
    summed = world.all_gather(mine).flatten()
    held = [
        ScaledTensor(summed[place].clone().view(CODES).view(part.shape), scale.reciprocal()[None])
        for part, place, scale in zip(parts, places, scales, strict=True)
    ]
    is_largest = (codes & 0x7F) == 0x7E  # of either sign
    return held, torch.stack([is_largest.sum(), torch.tensor(ends[-1], device=largest.device)])


def _scale(largest: Tensor) -> Tensor:
    """A scale that is a power of two, so that decoding is exact, as in the authors' program (MS-AMP)."""
    return current_scale(largest, CODES, power_of_2=True)


def _encode(values: Tensor, scale: Tensor) -> Tensor:
    """Codes as bytes. Infinity becomes NaN, as it would pass for a finite number as the largest code."""
    scaled = values.float() * scale
    limit = largest_code(CODES)
    return scaled.masked_fill_(scaled.isinf(), torch.nan).clamp_(-limit, limit).to(CODES).view(torch.uint8)
