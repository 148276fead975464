"""Rows of a plan for a format that has Hugging Face's tensors otherwise than published files: GGUF, and mlx-lm's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from precisionctl.architectures.param_map import Row
from precisionctl.architectures.rearrangements import Rearrangement
from precisionctl.checkpoints.tensor_changes import AsItIs, TensorChange
from precisionctl.model.model_shape import ModelShape
from precisionctl.planning.plan import Job

MadeOf: TypeAlias = Callable[[Job, str], tuple[TensorChange, Sequence[str]]]
"""What a format makes of a tensor that a job writes: how, and the names of what is made."""


def jobs_in_format(jobs: Iterable[Job], made_of: MadeOf) -> Iterator[Job]:
    """The jobs with what a format makes of what they write, but for copies of tied tensors, which are not written."""
    rows = dict[int, Row]()
    for job in jobs:
        made = [made_of(job, name) for name in job.writes[: len(job.row.hf)]]  # behind these are the copies
        if id(job.row) not in rows:  # as all jobs of a row share it
            changes = tuple(change for change, _ in made)
            if all(isinstance(change, AsItIs) for change in changes):
                rows[id(job.row)] = job.row
            else:
                changed = ChangedParts(job.row.rearrangement, changes)
                rows[id(job.row)] = replace(job.row, rearrangement=changed, as_stored=job.row.source)
        yield replace(job, row=rows[id(job.row)], writes=tuple(name for _, names in made for name in names))


@dataclass(frozen=True)
class ChangedParts:
    """How tensors are made of a Megatron tensor: Hugging Face's first, and of each the change that the format has."""

    inner: Rearrangement
    changes: tuple[TensorChange, ...]

    @property
    def moves_single_rows(self) -> bool:
        return self.inner.moves_single_rows or not all(isinstance(change, AsItIs) for change in self.changes)

    def moves_rows(self, model: ModelShape) -> bool:
        return self.inner.moves_rows(model) and all(change.moves_rows for change in self.changes)

    def merge(self, parts: Sequence[Any], model: ModelShape) -> Any:
        raise NotImplementedError("formats with changes are read by their own Readers")

    def split(self, whole: Any, model: ModelShape) -> tuple[Any, ...]:
        parts = self.inner.split(whole, model)
        pairs = zip(self.changes, parts, strict=True)
        return tuple(made for change, part in pairs for made in change.to_parts(part, model))
