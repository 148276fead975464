"""Outcome: what jobs find out about tensors while a plan is carried out, and the notes on it."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from precisionctl.errors import BROKEN_WEIGHTS


@dataclass
class Outcome:
    """What jobs found out, and the `notes` for the user that follow from it.

    `amax` is the amax of each FP8 GEMM's weight, by Megatron's name, if the command collects it. `changed` has, for
    each tensor that could not keep all its scales, the number of codes that differ from before, or, of a recoding that
    rounds (`conversion/recoding.py`), of values. `with_nan` are tensors with NaN, among those whose values were cast or
    encoded. `rounded` are tensors of codes with zero points of which some values had been rounded to BF16. `zeroed` has
    the share of elements that became zero, for tensors where it exceeds the limit beyond which `inspect --fp8` advises
    against FP8 (codes.statistics.UNDERFLOW), or leaves a module out of four bits (codes.four_bit_loss.most_zeros).
    """

    amax: dict[str, float] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    with_nan: set[str] = field(default_factory=set)
    rounded: set[str] = field(default_factory=set)
    zeroed: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __ior__(self, other: "Outcome") -> "Outcome":
        """Add what was found out about other tensors."""
        self.amax |= other.amax
        self.changed |= other.changed
        self.with_nan |= other.with_nan
        self.rounded |= other.rounded
        self.zeroed |= other.zeroed
        self.notes += other.notes
        return self

    def as_json(self) -> dict[str, object]:
        """All except the notes, for a journal or another rank."""
        names = {"with_nan": sorted(self.with_nan), "rounded": sorted(self.rounded)}
        return {"amax": self.amax, "changed": self.changed, "zeroed": self.zeroed, **names}

    @classmethod
    def from_json(cls, value: Any) -> "Outcome":
        """The inverse of `as_json`. Raises ValueError for anything else."""
        match value:
            case {
                "amax": dict(amax),
                "changed": dict(changed),
                "with_nan": list(with_nan),
                "rounded": list(rounded),
                "zeroed": dict(zeroed),
            }:
                numbers, names = [*amax.values(), *changed.values(), *zeroed.values()], [*with_nan, *rounded]
                if all(isinstance(n, int | float) for n in numbers) and all(isinstance(n, str) for n in names):
                    return cls(amax, changed, set(with_nan), set(rounded), zeroed)
        raise ValueError("no outcome of jobs")


def nan_notes(names: Collection[str]) -> Iterator[str]:
    """A note that source and result have NaN. FP8 has codes for it, so it is not refused as infinite weights are."""
    if names:
        first = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
        yield (
            f"WARNING: the source has NaN in {len(names)} of its tensors, and so has the result ({first}): "
            f"what is computed with them is NaN. {BROKEN_WEIGHTS}"
        )


def zeroed_notes(shares: Mapping[str, float]) -> Iterator[str]:
    """A note on tensors in which many elements became zero, the worst first, with advice."""
    if shares:
        worst = sorted(shares, key=lambda name: (-shares[name], name))
        first = ", ".join(f"{name} {shares[name]:.1%}" for name in worst[:3]) + (", ..." if len(worst) > 3 else "")
        yield (
            f"WARNING: many elements became 0 in {len(worst)} of the tensors ({first}): the largest ones take up all "
            f"of their scales' range. Leave such modules out (--exclude '{worst[0].removesuffix('.weight')}'), or "
            "choose another scheme (`export-inference --scheme`)."
        )
