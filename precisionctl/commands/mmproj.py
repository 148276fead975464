"""The second file of an export for llama.cpp: the towers of a wrapper, by which it computes with images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.gguf.file_types import FILE_TYPES, ValuesType
from precisionctl.checkpoints.gguf.metadata_bytes import GgufValue, Metadata
from precisionctl.checkpoints.gguf.towers import tower_of
from precisionctl.checkpoints.gguf.towers.mmproj_file import OF_TOWERS
from precisionctl.checkpoints.gguf.writer import GgufContents
from precisionctl.dtypes import DType
from precisionctl.export.gguf.towers_plan import token_embedding, towers_in_gguf
from precisionctl.param import shared_spec
from precisionctl.planning.plan import Plan
from precisionctl.sizes import counted, listed


@dataclass(frozen=True)
class Mmproj:
    """A second file, the plan of its tensors, and notes on what is in it, and what llama.cpp makes of it."""

    contents: GgufContents
    plan: Plan
    notes: list[str]


def mmproj_of(plan: Plan, reader: Reader, name: str, kind: ValuesType, about: Callable[[Plan], Metadata]) -> Mmproj:
    """The file of a wrapper's towers, called `name`. `about` says the general metadata of a plan, and `plan` is one of
    values in Hugging Face's layout.

    Raises UnknownArchitecture for towers that llama.cpp has not, or of which it would compute something else.
    """
    tower = tower_of(plan.model, reader.companions)
    towers = towers_in_gguf(plan, tower, kind)
    made = {tower.token[0]: token_embedding(plan, reader, tower.token[1]).numpy()} if tower.token else {}
    stored = {each: shared_spec(values.shape, DType.float32) for each, values in made.items()} | {**towers.targets}
    metadata: dict[str, GgufValue] = {
        "general.architecture": OF_TOWERS,
        "general.type": "mmproj",
        **about(replace(towers, targets=stored)),
        "general.file_type": np.uint32(FILE_TYPES[kind]),
        **tower.metadata,
        "general.quantization_version": np.uint32(2),
    }
    contents = GgufContents(name, metadata, towers.targets, made)

    notes = [f"The towers, {counted(len(towers.jobs), 'tensor')} of the source, are in {name}."]
    written = {job.reads for job in towers.jobs}
    if left_out := [job.writes[0] for job in plan.towers.jobs if job.reads not in written]:
        notes[0] += f" Not written are {listed(left_out)}: no token is computed with them."
    if tower.otherwise:
        notes.append(f"With them llama.cpp computes otherwise than transformers: {tower.otherwise}.")
    return Mmproj(contents, towers, notes)
