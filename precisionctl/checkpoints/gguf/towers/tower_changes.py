"""How values of towers stand in llama.cpp's tensors, and in the Hugging Face tensor that they are of; each with its
inverse. No size is asked of the text model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from precisionctl.architectures.rearrangements import Movable, concatenated, cut_into
from precisionctl.checkpoints.tensor_changes import RowMove, Shape, ValueChange, no_parts
from precisionctl.errors import DamagedCheckpoint
from precisionctl.model.model_shape import ModelShape
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AxesApart(RowMove):
    """Queries, keys and values in one tensor, of so many `heads`. Rotary pairs of queries and keys go by column and by
    row of an image in turns; in llama.cpp a head has all that go by column, then all others."""

    heads: int

    def to_parts(self, values: Movable, model: ModelShape) -> tuple[Movable, ...]:
        return (self._exchanged(values, (-1, 2)),)

    def to_hf(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        return self._exchanged(parts[0], (2, -1))

    def _exchanged(self, rows: Movable, order: tuple[int, int]) -> Movable:
        if len(rows) % (12 * self.heads):
            raise DamagedCheckpoint(f"{len(rows)} rows are no queries, keys and values of {self.heads} heads")
        third = len(rows) // 3
        pairs = third // self.heads // 4
        sizes = [pairs if size < 0 else size for size in order]
        turned, values = cut_into(rows, [2 * third, third])
        moved = turned.reshape(2 * self.heads, *sizes, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(turned.shape)
        return concatenated([moved, values])


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


class KernelOfPatches(ValueChange):
    """A linear of square patches, `[channels, height * width * 3]`, in llama.cpp the kernel of a convolution,
    `[channels, 3, height, width]`."""

    def to_parts(self, values: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        (shape,) = self.part_shapes(tuple(values.shape), model)
        return (values.reshape(shape[0], *shape[2:], 3).permute(0, 3, 1, 2),)

    def to_hf(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        return parts[0].permute(0, 2, 3, 1).flatten(1)

    def part_shapes(self, shape: Shape, model: ModelShape) -> tuple[Shape, ...]:
        side = math.isqrt(shape[1] // 3)
        return ((shape[0], 3, side, side),)

    def hf_shape(self, shapes: Sequence[Shape], model: ModelShape) -> Shape:
        if len(shapes[0]) != 4 or shapes[0][1] != 3 or shapes[0][2] != shapes[0][3]:
            raise no_parts(shapes)
        return shapes[0][0], 3 * shapes[0][2] * shapes[0][3]


class Number(ValueChange):
    """One number, `[]`, in llama.cpp `[1]`."""

    def to_parts(self, values: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        return (values.reshape(1),)

    def to_hf(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        return parts[0]  # which rows are taken of

    def part_shapes(self, shape: Shape, model: ModelShape) -> tuple[Shape, ...]:
        return ((1,),)

    def hf_shape(self, shapes: Sequence[Shape], model: ModelShape) -> Shape:
        if shapes[0] != (1,):
            raise no_parts(shapes)
        return ()


class Softplus(ValueChange):
    """Factors that are computed by softplus, which llama.cpp's are the result of."""

    computes: ClassVar[bool] = True

    def to_parts(self, values: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        return (torch.nn.functional.softplus(values.float()),)

    def to_hf(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        # the inverse in FP64: of what lies near 0 the logarithm of a difference has few digits
        wide = parts[0].double()
        return (wide + torch.log(-torch.expm1(-wide))).float()


FRAMES = KernelOfFrames()
COLOURS_LAST = KernelOfPatches()
NUMBER = Number()
SOFTPLUS = Softplus()
