"""Shadow: the same batch forward and backward in BF16 and in FP8 from the same weights, and how far apart they are.

The passes in FP8 are the update's own, so that what is judged is what is trained with; the passes in BF16 are made
before them, and nothing is left of those but their loss and gradients.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from precisionctl.trainer.parallel.shares import ALL_MINE, Shares
from precisionctl.trainer.parallel.world import local

Decision = Literal["ok", "warn", "stop", "bf16"]


@dataclass(frozen=True)
class Likeness:
    """FP8's gradients beside BF16's: the cosine between the two, and the norm of FP8's over that of BF16's."""

    cosine: float
    norm_ratio: float


@dataclass(frozen=True)
class Shadow:
    """One look. Losses are means over the update's targets, held-out ones over all targets of that data, before the
    update. `decision` is what the guard made of it, at the `beyond`-th look running that was beyond its limit."""

    step: int
    loss: float
    loss_bf16: float
    gradients: Likeness
    modules: Mapping[str, Likeness]
    held_out: tuple[float, float] | None = None
    """In FP8 and in BF16."""
    decision: Decision = "ok"
    beyond: int = 0

    @property
    def gap(self) -> float:
        """How far the losses are apart, as (FP8 - BF16) / BF16."""
        return _gap(self.loss, self.loss_bf16)

    @property
    def held_out_gap(self) -> float | None:
        return _gap(*self.held_out) if self.held_out else None

    @property
    def worst(self) -> float:
        """The larger of the gaps, above or below; NaN where one is no number."""
        gaps = [abs(self.gap), *([abs(_gap(*self.held_out))] if self.held_out else [])]
        return math.nan if any(map(math.isnan, gaps)) else max(gaps)

    def decided(self, decision: Decision, beyond: int) -> "Shadow":
        return replace(self, decision=decision, beyond=beyond)

    def numbers(self) -> dict[str, float]:
        """Those of the model as a whole."""
        found = {
            "loss_bf16": self.loss_bf16,
            "gap": self.gap,
            "grad_cosine": self.gradients.cosine,
            "grad_norm_ratio": self.gradients.norm_ratio,
        }
        if self.held_out:
            fp8, bf16 = self.held_out
            found |= {"held_out_loss": fp8, "held_out_loss_bf16": bf16, "held_out_gap": _gap(fp8, bf16)}
        return found

    def as_dict(self) -> dict[str, Any]:
        """A line of `shadow.jsonl`; of each module `[cosine, norm ratio]`."""
        modules = {name: [like.cosine, like.norm_ratio] for name, like in self.modules.items()}
        decided = {"decision": self.decision, "beyond": self.beyond}
        return {"step": self.step, "loss": self.loss, **self.numbers(), **decided, "modules": modules}


def _gap(fp8: float, bf16: float) -> float:
    return (fp8 - bf16) / bf16 if bf16 else (0.0 if fp8 == bf16 else math.inf)


def liken(
    fp8: Mapping[str, Tensor], bf16: Mapping[str, Tensor], shares: Shares = ALL_MINE
) -> tuple[Likeness, dict[str, Likeness]]:
    """Gradients by parameter: all of them together, and by module. One that is not there is zero. Each rank has its
    part of them; copies of the model count alike in all products, and so in no likeness, but what tensor ranks have
    alike counts once."""
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(3, dtype=torch.float64))
    for name in {**bf16, **fp8}:
        sums[name.rpartition(".")[0]] += _products(fp8.get(name), bf16.get(name)) if shares.is_own(name) else 0
    device = next(iter({**bf16, **fp8}.values())).device
    whole = shares.world.sum(torch.stack([*sums.values()]).to(device)).cpu()
    modules = {module: _likeness(products) for module, products in zip(sums, whole, strict=True)}
    return _likeness(whole.sum(0)), modules


def _products(fp8: Tensor | None, bf16: Tensor | None) -> Tensor:
    """`[3]`, FP64: FP8's gradient with itself, with BF16's, and BF16's with itself."""
    pairs = ((fp8, fp8), (fp8, bf16), (bf16, bf16))
    return torch.tensor(
        [0.0 if a is None or b is None else float((local(a) * local(b)).sum(dtype=torch.float64)) for a, b in pairs],
        dtype=torch.float64,
    )


def _likeness(products: Tensor) -> Likeness:
    fp8, between, bf16 = products.tolist()
    if fp8 == bf16 == 0:
        return Likeness(1.0, 1.0)
    both = math.sqrt(fp8) * math.sqrt(bf16)
    return Likeness(between / both if both else 0.0, math.sqrt(fp8 / bf16) if bf16 else math.inf)
