"""Gradients in FP8: a code for each number and a scale for each tensor, summed over ranks as codes.

Peng et al., "FP8-LM: Training FP8 Large Language Models" (2023, arXiv 2310.18313), section 2.1. There NCCL adds up
codes in FP8. Here each rank is sent the codes of its part of every tensor by all others, adds up what they are worth in
FP32, and sends the codes of the sum to all: the same bytes between ranks, and no sum that overflows.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from precisionctl.fp8.numerics import FP8_MAX, amax, code_values, current_scale
from precisionctl.trainer.optimizer.scaled import Scaled
from precisionctl.trainer.parallel.world import World

CODES = torch.float8_e4m3fn
BUCKET = 1 << 24
"""Numbers that ranks exchange at a time, or one tensor of more."""

SATURATED = 1e-5
"""The share of codes that are the largest one beyond which mu is halved."""

DOUBLED_IN = 1000
"""Updates in which mu doubles while the share is below."""


class Fp8Gradients:
    """The gradients of an update, by parameter, as FP8 codes. What ranks exchange are codes of `mu` times their
    gradients: the paper's auto-scaling factor."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """`parameters` may have one; they have the same names and shapes in all ranks."""
        self.mu = 1.0
        self.held: dict[str, Scaled] = {}
        self._parameters = parameters
        self._saturated: float | None = None

    def take(self, gradients: dict[str, Tensor], world: World) -> None:
        """Hold the sum over all ranks of gradients in any dtype, which are let go of one after the other."""
        if world.count == 1:
            for name in [*gradients]:
                self.held[name] = _held(gradients.pop(name).float())
            return
        device = next(iter(self._parameters.values())).device
        none = torch.full((), -1.0, device=device)
        mine = [amax(gradients[name]) if name in gradients else none for name in self._parameters]
        largest = dict(zip(self._parameters, world.largest(torch.stack(mine)), strict=True))
        counts = torch.zeros(2, dtype=torch.int64, device=device)
        for names in self._buckets([name for name, found in largest.items() if found >= 0]):
            zeros = {name: torch.zeros_like(self._parameters[name]) for name in names if name not in gradients}
            parts = [zeros[name] if name in zeros else gradients.pop(name) for name in names]
            summed, count = _sum(parts, torch.stack([largest[name] for name in names]), world, self.mu)
            self.held |= zip(names, summed, strict=True)
            counts += count
        saturated, codes = world.sum(counts).tolist()
        self._saturated = saturated / max(1, codes)

    def _buckets(self, names: Sequence[str]) -> Iterator[list[str]]:
        bucket: list[str] = []
        for name in names:
            if bucket and sum(self._parameters[each].numel() for each in (*bucket, name)) > BUCKET:
                yield bucket
                bucket = []
            bucket.append(name)
        if bucket:
            yield bucket

    def settle(self) -> None:
        """After an update, whose gradients are gone: mu of the next one."""
        if self._saturated is not None:
            self.mu *= 0.5 if self._saturated > SATURATED else 2 ** (1 / DOUBLED_IN)
        self.clear()

    def clear(self) -> None:
        """Let go of the gradients, as if there had been none."""
        self.held, self._saturated = {}, None

    def norm(self) -> Tensor:
        """The norm of all gradients together, FP32 `[]`."""
        norms = [held.read().norm() for held in self.held.values()]
        return torch.stack(norms).norm() if norms else next(iter(self._parameters.values())).new_zeros(()).float()

    def scale_by(self, factor: Tensor) -> None:
        """Multiply all of them by `[]`, which changes no code."""
        for held in self.held.values():
            held.scale_inv.mul_(factor)


def _held(values: Tensor) -> Scaled:
    """FP32 values as codes."""
    scale = _scale(amax(values))
    return Scaled(_encode(values, scale).view(CODES), scale.reciprocal()[None])


def _sum(parts: Sequence[Tensor], largest: Tensor, world: World, mu: float) -> tuple[list[Scaled], Tensor]:
    """The sums of tensors over ranks, `largest` `[tensors]` being their largest magnitudes in any; and how many of the
    codes that this rank has sent are the largest one, and how many they are, int64 `[2]`."""
    ends = list(itertools.accumulate(part.numel() for part in parts))
    places = [slice(end - part.numel(), end) for part, end in zip(parts, ends, strict=True)]
    each = -(-ends[-1] // world.count)  # numbers that a rank adds up; the last one's are filled up with zeros
    here = [slice(*(min(max(at - world.rank * each, 0), each) for at in (place.start, place.stop))) for place in places]

    scales = mu * _scale(largest)
    codes = torch.zeros(each * world.count, dtype=torch.uint8, device=largest.device)
    for part, place, scale in zip(parts, places, scales, strict=True):
        codes[place] = _encode(part.flatten(), scale)
    total = code_values(world.exchanged(codes.view(world.count, each)).view(CODES)).sum(0)
    for place, scale in zip(here, scales, strict=True):
        total[place] *= scale.reciprocal()

    amaxes = [total[place].abs().amax() if place.start < place.stop else total.new_zeros(()) for place in here]
    scales = _scale(world.largest(torch.stack(amaxes).nan_to_num(nan=torch.inf)))  # of NaN ranks may find no largest
    mine = torch.zeros(each, dtype=torch.uint8, device=largest.device)
    for place, scale in zip(here, scales, strict=True):
        mine[place] = _encode(total[place], scale)
    summed = world.gathered(mine).flatten()
    held = [
        Scaled(summed[place].clone().view(CODES).view(part.shape), scale.reciprocal()[None])
        for part, place, scale in zip(parts, places, scales, strict=True)
    ]
    at_most = (codes & 0x7F) == 0x7E  # whatever the sign
    return held, torch.stack([at_most.sum(), torch.tensor(ends[-1], device=largest.device)])


def _scale(largest: Tensor) -> Tensor:
    """A power of two, as the authors' own program has it (MS-AMP), so that decoding is exact."""
    return current_scale(largest, CODES, power_of_2=True)


def _encode(values: Tensor, scale: Tensor) -> Tensor:
    """Codes as bytes. What is infinite must not become the largest code and pass for a number: it is NaN."""
    scaled = values.float() * scale
    limit = FP8_MAX[CODES]
    return scaled.masked_fill_(scaled.isinf(), torch.nan).clamp_(-limit, limit).to(CODES).view(torch.uint8)
