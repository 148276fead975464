"""Shadow: the same batch forward and backward in FP8 and in BF16 with the same weights, and how far apart they are.
All of it holds of NVFP4, too.

The FP8 passes are the update's own, so the numbers that the run trains with are judged. The BF16 passes are made before
them, and only their loss and gradients are kept.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from precisionctl.trainer.measure.metrics import relative_gap
from precisionctl.trainer.parallel.shards import UNSHARDED, ModelShards
from precisionctl.trainer.parallel.world import local

Decision = Literal["ok", "warn", "stop", "bf16"]


@dataclass(frozen=True)
class GradientSimilarity:
    """How similar FP8 and BF16 gradients are: the cosine between them, and FP8's norm divided by BF16's."""

    cosine: float
    norm_ratio: float


@dataclass(frozen=True)
class Bf16Passes:
    """What the BF16 passes of an update gave: the mean loss over its targets, the gradients by parameter name, and the
    held-out losses in FP8 and in BF16 from before the update; None without held-out data."""

    loss: float
    gradients: Mapping[str, Tensor]
    held_out: tuple[float, float] | None


@dataclass(frozen=True)
class Shadow:
    """One comparison, at the update `step`. Losses are means over the update's targets; held-out losses, from before
    the update, are means over all held-out targets. `gradients` compares all gradients, `modules` those of each module.
    `decision` is the guard's, and `beyond` the number of comparisons in a row that were beyond its limit."""

    step: int
    loss: float
    loss_bf16: float
    gradients: GradientSimilarity
    modules: Mapping[str, GradientSimilarity]
    held_out: tuple[float, float] | None = None
    """Held-out losses in FP8 and in BF16."""
    decision: Decision = "ok"
    beyond: int = 0

    @property
    def gap(self) -> float:
        """The relative difference of the losses, (FP8 - BF16) / BF16."""
        return relative_gap(self.loss, self.loss_bf16)

    @property
    def held_out_gap(self) -> float | None:
        """The relative difference of the held-out losses; None without held-out data."""
        return relative_gap(*self.held_out) if self.held_out else None

    @property
    def worst(self) -> float:
        """The larger of the two gaps, without sign; NaN if one of them is NaN."""
        gaps = [abs(gap) for gap in (self.gap, self.held_out_gap) if gap is not None]
        return math.nan if any(map(math.isnan, gaps)) else max(gaps)

    def numbers(self) -> dict[str, float]:
        """The numbers for the model as a whole, by name."""
        found = {
            "loss_bf16": self.loss_bf16,
            "gap": self.gap,
            "grad_cosine": self.gradients.cosine,
            "grad_norm_ratio": self.gradients.norm_ratio,
        }
        if self.held_out:
            fp8, bf16 = self.held_out
            found |= {"held_out_loss": fp8, "held_out_loss_bf16": bf16, "held_out_gap": relative_gap(fp8, bf16)}
        return found

    def as_dict(self) -> dict[str, Any]:
        """A line of `shadow.jsonl`, with `[cosine, norm ratio]` for each module."""
        modules = {name: [each.cosine, each.norm_ratio] for name, each in self.modules.items()}
        decided = {"decision": self.decision, "beyond": self.beyond}
        return {"step": self.step, "loss": self.loss, **self.numbers(), **decided, "modules": modules}


def compare_gradients(
    fp8: Mapping[str, Tensor], bf16: Mapping[str, Tensor], shards: ModelShards = UNSHARDED
) -> tuple[GradientSimilarity, dict[str, GradientSimilarity]]:
    """Compare gradients, which are by parameter name: all together, and for each module. A missing gradient is zero.

    Each rank has its shards, and sums of products are all-reduced. Replicas over data-parallel ranks multiply all sums
    by the same factor, which cancels out; what tensor ranks have in common is counted once.
    """
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(3, dtype=torch.float64))
    for name in {**bf16, **fp8}:
        products = sums[name.rpartition(".")[0]]
        ours, theirs = fp8.get(name), bf16.get(name)
        for number, (a, b) in enumerate(((ours, ours), (ours, theirs), (theirs, theirs))):
            if a is not None and b is not None and shards.is_own(name):
                products[number] += float((local(a) * local(b)).sum(dtype=torch.float64))
    device = next(iter({**bf16, **fp8}.values())).device
    whole = shards.world.all_reduce_sum(torch.stack([*sums.values()]).to(device)).cpu()
    modules = {module: _similarity(products) for module, products in zip(sums, whole, strict=True)}
    return _similarity(whole.sum(0)), modules


def _similarity(products: Tensor) -> GradientSimilarity:
    """The similarity from dot products, FP64 `[3]`: FP8 with FP8, FP8 with BF16, BF16 with BF16."""
    fp8, between, bf16 = products.tolist()
    if fp8 == bf16 == 0:
        return GradientSimilarity(1.0, 1.0)
    both = math.sqrt(fp8) * math.sqrt(bf16)
    return GradientSimilarity(between / both if both else 0.0, math.sqrt(fp8 / bf16) if bf16 else math.inf)
