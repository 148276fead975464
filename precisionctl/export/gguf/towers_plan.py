"""A plan of a wrapper's towers as one of llama.cpp's second file, `mmproj`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.chunks import read_values
from precisionctl.checkpoints.gguf.file_types import ValuesType
from precisionctl.checkpoints.gguf.towers.tower import Tower, TowerRow
from precisionctl.checkpoints.tensor_changes import TensorChange
from precisionctl.dtypes import DType
from precisionctl.export.changed_parts import jobs_in_format
from precisionctl.param import TensorSpec, shared_spec
from precisionctl.planning.plan import Job, Plan

if TYPE_CHECKING:
    from torch import Tensor

_STORED = {"bf16": DType.bfloat16, "f16": DType.float16}
_OF_PIXELS = (".patch_embd.weight", ".patch_merger.weight")


def towers_in_gguf(plan: Plan, tower: Tower, kind: ValuesType) -> Plan:
    """The plan of `mmproj`, of a `plan` of values in Hugging Face's layout, in the order in which a file of Hugging
    Face's tensors has these. Raises UnknownArchitecture where they are not those of the tower."""
    towers = plan.towers
    tensors = tower.tensors(towers.targets)
    targets = dict[str, TensorSpec]()
    for name in sorted(tensors):
        row, made = tensors[name]
        shapes = row.change.part_shapes(towers.targets[name].shape, plan.model)
        for each, shape in zip(made, shapes, strict=True):
            targets[each] = shared_spec(shape, _stored_as(each, shape, row, kind))

    def made_of(job: Job, name: str) -> tuple[TensorChange, Sequence[str]]:
        row, made = tensors[name]
        return row.change, made

    jobs = (job for job in towers.jobs if job.writes[0] in tensors)
    return replace(towers, jobs=tuple(jobs_in_format(jobs, made_of)), targets=targets)


def token_embedding(plan: Plan, reader: Reader, token: int) -> Tensor:
    """A wrapper's embedding of a token, FP32 `[hidden size]`, read through a plan in Hugging Face's layout."""
    assert plan.model.wrapper is not None, "only a wrapper has towers"
    name = plan.model.wrapper.name_of("model.embed_tokens.weight")
    (read,) = next(job.reads for job in plan.text.jobs if name in job.writes)
    return read_values(reader, reader.encodings, read, token, 1).float()[0]


def _stored_as(name: str, shape: tuple[int, ...], row: TowerRow, kind: ValuesType) -> DType:
    """FP32 for what llama.cpp's converter has in it: vectors, norms, positions, and kernels beside BF16."""
    if len(shape) < 2 or name.endswith("_norm.weight"):
        return DType.float32
    if row.dtype:
        return row.dtype
    if len(shape) == 4 or any(each in name for each in _OF_PIXELS):
        return DType.float16 if kind == "f16" else DType.float32
    return _STORED[kind] if name.endswith(".weight") and name != "v.position_embd.weight" else DType.float32
