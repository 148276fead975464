"""The second file of an export for llama.cpp: the towers of a wrapper, by which it computes with images."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.gguf.metadata_bytes import GgufValue, Metadata
from precisionctl.checkpoints.gguf.towers import tower_of
from precisionctl.checkpoints.gguf.writer import GgufContents
from precisionctl.export.gguf.gguf_plan import FILE_TYPES
from precisionctl.export.gguf.towers_plan import TowerType, towers_in_gguf
from precisionctl.planning.plan import Plan
from precisionctl.sizes import counted, listed


@dataclass(frozen=True)
class Mmproj:
    """A second file, and the plan of its tensors. `left_out` are towers' tensors that nothing is computed with."""

    contents: GgufContents
    plan: Plan
    left_out: tuple[str, ...]

    @property
    def note(self) -> str:
        """What is in it."""
        said = f"The towers, {counted(len(self.plan.jobs), 'tensor')}, are in {self.contents.name}."
        if not self.left_out:
            return said
        return f"{said} Not written are {listed(self.left_out)}: no token is computed with them."


def mmproj_of(
    plan: Plan, companions: Companions, name: str, kind: TowerType, about: Callable[[Plan], Metadata]
) -> Mmproj:
    """The file of a wrapper's towers that belongs to a text model's, called `name`. `about` says the general
    metadata of a plan, and `plan` is one of values in Hugging Face's layout.

    Raises UnknownArchitecture for towers that llama.cpp has not, or of which it would compute something else.
    """
    tower = tower_of(plan.model, companions)
    towers = towers_in_gguf(plan, tower, kind)
    metadata: dict[str, GgufValue] = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        **about(towers),
        "general.file_type": np.uint32(FILE_TYPES[kind]),
        **tower.metadata,
        "general.quantization_version": np.uint32(2),
    }
    written = {job.reads for job in towers.jobs}
    left_out = tuple(job.writes[0] for job in plan.towers.jobs if job.reads not in written)
    return Mmproj(GgufContents(name, metadata, towers.targets), towers, left_out)
