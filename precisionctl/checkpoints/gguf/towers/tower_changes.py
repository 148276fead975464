"""How values of towers stand in llama.cpp's tensors, and in the Hugging Face tensor that they are of; each with its
inverse. No size is asked of the text model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from precisionctl.architectures.rearrangements import Movable, concatenated, cut_into
from precisionctl.checkpoints.tensor_changes import RowMove, Shape, ValueChange, no_parts
from precisionctl.errors import DamagedCheckpoint
from precisionctl.model.model_shape import ModelShape
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor


class QueriesKeysValues(RowMove):
    """Three parts of equally many rows; in Hugging Face one tensor, of all rows of the first, of the second and of the
    third."""

    def to_parts(self, values: Movable, model: ModelShape) -> tuple[Movable, ...]:
        if len(values) % 3:
            raise DamagedCheckpoint(f"{len(values)} rows are no queries, keys and values")
        return tuple(cut_into(values, [len(values) // 3] * 3))

    def to_hf(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        return concatenated(parts)


class KernelOfFrames(ValueChange):
    """The kernel of patches of two frames, `[channels, colours, 2, height, width]`; the parts are one of each frame."""

    def to_parts(self, values: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        return values[:, :, 0], values[:, :, 1]

    def to_hf(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        return torch.stack(tuple(parts), 2)

    def part_shapes(self, shape: Shape, model: ModelShape) -> tuple[Shape, ...]:
        return ((*shape[:2], *shape[3:]),) * 2

    def hf_shape(self, shapes: Sequence[Shape], model: ModelShape) -> Shape:
        first, second = shapes
        if len(first) != 4 or first != second:
            raise no_parts(shapes)
        return (*first[:2], 2, *first[2:])


THREE_EQUAL = QueriesKeysValues()
FRAMES = KernelOfFrames()
