"""Read a file of towers, `mmproj`, by the names that a wrapper has for them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from precisionctl.checkpoints.gguf.head import GgufHead, read_head
from precisionctl.checkpoints.gguf.metadata_bytes import type_of
from precisionctl.checkpoints.gguf.tensors import ChangedTensor, ChangedTensors, GgufPart
from precisionctl.checkpoints.gguf.towers.tower import Tower
from precisionctl.errors import at, shown
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import TensorSpec
from precisionctl.untrusted.safe_files import check_file

if TYPE_CHECKING:
    from torch import Tensor

OF_TOWERS = "clip"
"""`general.architecture` of such a file."""
PROJECTORS = ("clip.projector_type", "clip.vision.projector_type", "clip.audio.projector_type")
"""The keys that say which graph llama.cpp computes."""


def is_mmproj(file: Path) -> bool:
    """Whether a GGUF file has towers, by its name, by which llama.cpp finds it too."""
    return "mmproj" in file.name


def read_mmproj(path: Path) -> GgufHead:
    """The head of a file of towers. Raises as `read_head`, and DamagedCheckpoint for a link out of its directory."""
    check_file(path, path.parent)
    return read_head(path)


class MmprojFile(ChangedTensors):
    """The towers of a file by the names of `specs`, which are the wrapper's, and as values in those shapes. Raises
    UnknownArchitecture where `specs` are not those of the `tower`, and as `read_mmproj`."""

    def __init__(self, path: Path, tower: Tower, specs: Mapping[str, TensorSpec], model: ModelShape) -> None:
        self._head = read_mmproj(path)
        self._tower, tensors = tower, self._head.tensors
        rows = {name: row for name, row in tower.tensors(specs).items() if all(each in tensors for each in row[1])}
        made = {
            name: ChangedTensor([GgufPart(each, tensors[each]) for each in names], row.change, model)
            for name, (row, names) in rows.items()
        }
        with at(path):
            super().__init__(made)
        read = {each for _, names in rows.values() for each in names} | ({tower.token[0]} if tower.token else set())
        self.others = {name: each.format.name for name, each in tensors.items() if name not in read}

    def vector(self, name: str, size: int) -> Tensor | None:
        """The values of a tensor by its name in the file, FP32 `[size]`; None where it is not there, or of another
        shape."""
        there = self._head.tensors.get(name)
        return GgufPart(name, there).rows(0, size).float() if there and there.shape == (size,) else None

    @cached_property
    def otherwise(self) -> list[tuple[str, str, str]]:
        """The keys of which the file says something else than the tower is, or the same as another type, of which
        llama.cpp does not read it: what the file says, and what that is."""
        found, asked = self._head.metadata, {"general.architecture": OF_TOWERS, **self._tower.metadata}
        clip = (key for key in found if key.startswith("clip."))
        values, types = list[tuple[str, str, str]](), list[tuple[str, str, str]]()
        for key in dict.fromkeys((*asked, *clip)):
            said, wanted = found.get(key), _plain(asked.get(key))
            if said != wanted:
                values.append((key, shown(said), shown(wanted)))
            elif self._head.types[key] != type_of(asked[key]):
                types.append((key, self._head.types[key], type_of(asked[key])))
        return [*values, *types]


def _plain(value: Any) -> Any:
    """A value as the head of a file is read."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value
