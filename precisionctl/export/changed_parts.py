"""Rows of a plan for a format that has Hugging Face's tensors otherwise than published files: GGUF, and mlx-lm's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from precisionctl.architectures.param_map import Row
from precisionctl.architectures.rearrangements import Rearrangement
from precisionctl.checkpoints.tensor_changes import AsItIs, TensorChange
from precisionctl.model.model_shape import ModelShape


def with_changes(row: Row, changes: tuple[TensorChange, ...]) -> Row:
    """The row with a change of each of its Hugging Face tensors."""
    if all(isinstance(change, AsItIs) for change in changes):
        return row
    return replace(row, rearrangement=ChangedParts(row.rearrangement, changes), as_stored=row.source)


@dataclass(frozen=True)
class ChangedParts:
    """How tensors are made of a Megatron tensor: Hugging Face's first, and of each the change that the format has."""

    inner: Rearrangement
    changes: tuple[TensorChange, ...]

    @property
    def moves_single_rows(self) -> bool:
        return self.inner.moves_single_rows or not all(isinstance(change, AsItIs) for change in self.changes)

    def is_row_permutation(self, model: ModelShape) -> bool:
        return self.inner.is_row_permutation(model) and all(change.moves_rows for change in self.changes)

    def merge(self, parts: Sequence[Any], model: ModelShape) -> Any:
        raise NotImplementedError("formats with changes are read by their own Readers")

    def split(self, whole: Any, model: ModelShape) -> tuple[Any, ...]:
        parts = self.inner.split(whole, model)
        pairs = zip(self.changes, parts, strict=True)
        return tuple(made for change, part in pairs for made in change.to_parts(part, model))
