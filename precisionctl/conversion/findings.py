"""Findings: what is found out about tensors while a plan is carried out."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from precisionctl.checkpoints.encodings_file import WeightEncodings
from precisionctl.param import TensorSpec


@dataclass
class Findings:
    """What jobs found out, and the `notes` for the user that follow from it.

    `amax`: the largest magnitude of each FP8 GEMM's weight, by Megatron's name, where a command asks for it.
    `changed`: how many codes differ from those that a tensor had, by the name of each that could not keep its scales.
    `with_nan`: tensors that were seen to hold a NaN. Where values are neither cast nor encoded, nobody looks.
    `zeroed`: the share of a tensor's elements that are zero as codes and not as values, where that is more than
    `inspect --fp8` would have in FP8.
    """

    amax: dict[str, float] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    with_nan: set[str] = field(default_factory=set)
    zeroed: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __ior__(self, other: "Findings") -> "Findings":
        """Take in what was found out about other tensors."""
        self.amax |= other.amax
        self.changed |= other.changed
        self.with_nan |= other.with_nan
        self.zeroed |= other.zeroed
        self.notes += other.notes
        return self

    def as_json(self) -> dict[str, object]:
        """All but the notes, for a journal or another rank."""
        return {"amax": self.amax, "changed": self.changed, "with_nan": sorted(self.with_nan), "zeroed": self.zeroed}

    @classmethod
    def from_json(cls, said: Any) -> "Findings":
        """The inverse of `as_json`. Raises ValueError for anything else."""
        match said:
            case {"amax": dict(amax), "changed": dict(changed), "with_nan": list(with_nan), "zeroed": dict(zeroed)}:
                numbers = [*amax.values(), *changed.values(), *zeroed.values()]
                if all(isinstance(n, int | float) for n in numbers) and all(isinstance(n, str) for n in with_nan):
                    return cls(amax, changed, set(with_nan), zeroed)
        raise ValueError("no findings")


def nan_notes(names: Collection[str]) -> Iterator[str]:
    """That there are NaN, which the result has as its source has them. They have codes of their own in FP8, so unlike
    infinite weights they are not refused."""
    if names:
        first = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
        yield (
            f"WARNING: the source has NaN in {len(names)} of its tensors, and so has the result ({first}): "
            "what is computed with them is NaN."
        )


def zeroed_notes(shares: Mapping[str, float]) -> Iterator[str]:
    """That tensors lost many of their elements to zero, the worst first, and what helps."""
    if shares:
        worst = sorted(shares, key=lambda name: (-shares[name], name))
        first = ", ".join(f"{name} {shares[name]:.1%}" for name in worst[:3]) + (", ..." if len(worst) > 3 else "")
        yield (
            f"WARNING: many elements became 0 in {len(worst)} of the tensors ({first}): the largest one takes up all "
            "of FP8's range. Leave such modules out with keep_bf16 in a --recipe, or choose a --scheme of finer scales."
        )


def changed_notes(
    changed: Mapping[str, int], encodings: WeightEncodings, codes: Mapping[str, TensorSpec]
) -> Iterator[str]:
    """What became of those weights among the result's `codes` that were codes before; `changed` as in Findings."""
    again = encodings.weights.keys() & codes.keys()
    others = {name for name in again if encodings.weights[name].element != codes[name].element}
    if again - others or not others:
        same = len(again) - len(others) - len(changed.keys() - others)
        yield f"{same} of {len(again) - len(others)} weights have the same codes and scales as before."
    if others:
        exact, before = len(others - changed.keys()), sorted({encodings.weights[name].element.name for name in others})
        yield (
            f"{exact} of {len(others)} weights are exactly the numbers that they were as codes of "
            f"{' and '.join(before)}, under the scales that they had; the rest is rounded to FP8."
        )
    if changed:
        total = sum(encodings.weights[name].rows * encodings.weights[name].columns for name in changed)
        number = sum(changed.values())
        worst = max(changed, key=lambda name: changed[name])
        yield (
            f"{len(changed)} have blocks with new scales (their values have changed, their rows were split, or other "
            f"blocks were asked for): {number:,.0f} of {total:,} codes differ, most of them in {worst}."
        )
