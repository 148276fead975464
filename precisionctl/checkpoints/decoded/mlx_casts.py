"""What weights become that mlx-lm has cut and turned, or added one to, when they are written and read again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from precisionctl.codes.elements import Cast
from precisionctl.codes.mlx_groups import MlxGroups
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor


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
