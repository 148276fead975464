"""Parameters of all experts of a layer, which transformers has in one tensor and files have in several ways."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, takewhile

from precisionctl.param import TensorSpec

JOINED = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
"""For each parameter of all experts in transformers, the matrices of one expert that it joins, one below the other."""


@dataclass(frozen=True)
class ExpertStack:
    """A parameter of all experts of a layer, as the base stores it: one tensor of which each expert is a slice
    (`in_one`), or one or two matrices per expert. `parts` has, for each stored tensor, its name, its expert's number
    and its first row in the parameter."""

    parameter: str
    count: int
    shape: tuple[int, int]
    parts: tuple[tuple[str, int, int], ...]
    in_one: bool

    def size(self, transposed: bool) -> tuple[int, int] | None:
        """The rows of B and the columns of A that fit one expert, if it is stored as [in, out] (`transposed`) or as
        [out, in]; None if it cannot be stored so."""
        if transposed:
            return self.shape[::-1] if self.in_one else None
        return self.shape


def stack_of(target: str, parameter: str, specs: Mapping[str, TensorSpec]) -> ExpertStack | None:
    """How a base stores a parameter of a module of experts; None where it does not."""
    spelled = [[(f"{target}.{parameter}[", "]")]]
    for module in (target, target.replace(".mlp.experts", ".block_sparse_moe.experts")):
        spelled += [[(f"{module}.", f".{part}.weight") for part in parts] for parts in JOINED[parameter]]
    for around in spelled:
        numbered = ([f"{before}{number}{after}" for before, after in around] for number in count())
        experts = list(takewhile(lambda names: all(name in specs for name in names), numbered))
        shapes = {specs[name].shape for names in experts for name in names}
        if len(shapes) == 1 and len(shape := shapes.pop()) == 2:
            parts = [
                (name, number, place * shape[0])
                for number, names in enumerate(experts)
                for place, name in enumerate(names)
            ]
            size = (len(around) * shape[0], shape[1])
            return ExpertStack(parameter, len(experts), size, tuple(parts), in_one=around is spelled[0])
    return None
