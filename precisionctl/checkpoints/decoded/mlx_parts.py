"""Weights that mlx-lm has cut, turned, or added one to (`mlx/mlx_names.py`): which parts they are made of, and what
they become when they are written so and read again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from precisionctl.codes.elements import Cast
from precisionctl.codes.mlx_groups import MlxGroups
from precisionctl.errors import DamagedCheckpoint, shown
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

PART = re.compile(r"(.+)/(\d{1,9})([ab]?)-(joined|turned|alternating|plus_one)\.weight")
"""A part of a weight: the weight's name, the part's place in it, and how it is there.

- `joined`: rows that follow those of the part before it
- `turned`: the same, of the part's transpose
- `alternating`: every second row, or whatever the number of parts is
- `plus_one`: the only one, a norm of which one is to be taken away

A place has one part, or two: `a`, and behind it `b`.
"""

_MOST_TURNED = 1 << 24
"""Most values of a part that is turned, all of which are in memory to read some of its rows. Models' have 10^5."""


@dataclass(frozen=True)
class WeightPart:
    """The tensor of a part, and its shape as it is stored or decodes."""

    name: str
    how: str
    shape: tuple[int, ...]

    @property
    def of_weight(self) -> tuple[int, ...]:
        """The shape that it has in the weight."""
        return self.shape[::-1] if self.how == "turned" else self.shape


def weights_in_parts(shapes: Mapping[str, tuple[int, ...]], where: object) -> dict[str, list[WeightPart]]:
    """The weights that are in parts, which are among tensors of these shapes, each with its parts in order. Raises
    DamagedCheckpoint for parts that do not make one weight."""
    found = dict[str, dict[tuple[int, str], WeightPart]]()
    for name, shape in shapes.items():
        if match := PART.fullmatch(name):
            weight, place, letter, how = match.groups()
            found.setdefault(weight, {})[int(place), letter] = WeightPart(name, how, shape)
    made = {}
    for weight, at in found.items():
        made[weight] = parts = [at[place] for place in sorted(at)]
        letters = sorted({letter for _, letter in at})
        complete = sorted(at) == [(place, letter) for place in range(len(at) // len(letters)) for letter in letters]
        complete = complete and letters in ([""], ["a", "b"])
        ranks = {len(part.shape) for part in parts}
        sizes = {part.of_weight if part.how == "alternating" else part.of_weight[1:] for part in parts}
        fits = complete and len(sizes) == 1 and ranks in ({1}, {2}) and not any(0 in part.shape for part in parts)
        if not fits or any(part.how == "turned" and prod(part.shape) > _MOST_TURNED for part in parts):
            shown_parts = ", ".join(f"{part.name} {shown(part.shape)}" for part in parts[:4])
            raise DamagedCheckpoint(f"{weight} is in parts that do not fit: {shown_parts}", where=where)
    return made


@dataclass(frozen=True)
class OfHeads(Cast):
    """Each head's rows of keys, turned, and of values, as codes of their own groups or, without, in BF16."""

    key_rows: int
    columns: int
    value_rows: int
    keys: MlxGroups | None
    values: MlxGroups | None

    @property
    def rows_together(self) -> int:  # type: ignore[override]
        return self.key_rows + self.value_rows

    @property
    def in_words(self) -> str:
        names = (groups.name if groups else "bfloat16" for groups in (self.keys, self.values))
        return " and ".join(dict.fromkeys(names))

    @property
    def share_a_scale(self) -> int | None:
        if self.values:
            return self.values.group
        return self.columns if self.keys else None

    def rounded(self, values: Tensor) -> Tensor:
        heads = values.view(-1, self.rows_together, self.columns)
        keys, rest = heads[:, : self.key_rows].mT, heads[:, self.key_rows :]
        made = [_rounded(keys, self.keys).mT, _rounded(rest, self.values)]
        return torch.cat(made, 1).reshape(values.shape)


def _rounded(values: Tensor, groups: MlxGroups | None) -> Tensor:
    if groups is None:
        return values.bfloat16().float()
    return groups.rounded(values.reshape(-1, values.shape[-1])).view(values.shape)


class NormPlusOne(Cast):
    """A norm's weight, of which mlx-lm keeps the sum with one in BF16."""

    @property
    def in_words(self) -> str:
        return "bfloat16, plus one"

    @property
    def share_a_scale(self) -> None:
        return None

    def rounded(self, values: Tensor) -> Tensor:
        return ((values.float() + 1).bfloat16().float() - 1).bfloat16().float()
