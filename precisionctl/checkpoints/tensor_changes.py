"""How values stand in GGUF's tensors, or mlx-lm's, and in the Hugging Face tensor that they are of; each with its
inverse.

Sources: llama.cpp's converter, conversion/*.py (modify_tensors) of llama-cpp-python 0.3.36; mlx-lm 0.32, models/*.py
(sanitize).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np

from precisionctl.architectures.head_rearrangements import QKV
from precisionctl.architectures.rearrangements import Movable, concatenated, cut_into, pairs_exchanged, rows_of_groups
from precisionctl.codes.row_factors import RowFactors
from precisionctl.errors import DamagedCheckpoint
from precisionctl.model.model_shape import ModelShape
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

Shape: TypeAlias = "tuple[int, ...]"

_MOST_ROWS = 1 << 24
"""A file from a stranger may say more, and NumPy would take the memory for their numbers."""


class TensorChange(Protocol):
    """What becomes of a Hugging Face tensor in another format, of which it is one or several parts, and back. One that
    `moves_rows` only puts rows (dimension 0) into another order, or into several tensors: it takes arrays of row
    numbers too. One that `computes` does so in FP32; all others keep each value."""

    @property
    def moves_rows(self) -> bool: ...
    @property
    def computes(self) -> bool: ...
    def to_parts(self, values: Any, model: ModelShape) -> tuple[Any, ...]: ...
    def to_hf(self, parts: Sequence[Any], model: ModelShape) -> Any: ...
    def part_shapes(self, shape: Shape, model: ModelShape) -> tuple[Shape, ...]: ...
    def hf_shape(self, shapes: Sequence[Shape], model: ModelShape) -> Shape:
        """The shape of the Hugging Face tensor. Raises DamagedCheckpoint for tensors of which none is made."""
        ...

    def alone(self, model: ModelShape) -> int:
        """Into how many equal runs of rows all of its tensors can be cut, each of which is changed alone."""
        ...


class RowMove:
    """The base of those that only move rows."""

    moves_rows: ClassVar[bool] = True
    computes: ClassVar[bool] = False

    def alone(self, model: ModelShape) -> int:
        return 1

    def to_parts(self, values: Movable, model: ModelShape) -> tuple[Movable, ...]:
        raise NotImplementedError

    def part_shapes(self, shape: Shape, model: ModelShape) -> tuple[Shape, ...]:
        if shape[0] > _MOST_ROWS:
            raise DamagedCheckpoint(f"{shape[0]} rows, more than any model's tensor has")
        return tuple((len(part), *shape[1:]) for part in self.to_parts(np.empty((shape[0], 1), np.uint8), model))

    def hf_shape(self, shapes: Sequence[Shape], model: ModelShape) -> Shape:
        if not all(shape and shape[1:] == shapes[0][1:] for shape in shapes):
            raise no_parts(shapes)
        whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        if self.part_shapes(whole, model) != tuple(shapes):
            raise no_parts(shapes)
        return whole


class ValueChange:
    """The base of those that move single values, or compute; most do so with small tensors, and keep their shape."""

    moves_rows: ClassVar[bool] = False

    @property
    def computes(self) -> bool:
        return False

    def alone(self, model: ModelShape) -> int:
        return 1

    def part_shapes(self, shape: Shape, model: ModelShape) -> tuple[Shape, ...]:
        return (shape,)

    def hf_shape(self, shapes: Sequence[Shape], model: ModelShape) -> Shape:
        return shapes[0]


class AsItIs(RowMove):
    """The same tensor."""

    def to_parts(self, values: Movable, model: ModelShape) -> tuple[Movable, ...]:
        return (values,)

    def to_hf(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        return parts[0]

    def part_shapes(self, shape: Shape, model: ModelShape) -> tuple[Shape, ...]:
        return (shape,)

    def hf_shape(self, shapes: Sequence[Shape], model: ModelShape) -> Shape:
        return shapes[0]


@dataclass(frozen=True)
class Multiplied(AsItIs):
    """The same rows; what is stored are products with the model's `factors` of them."""

    factors: Callable[[ModelShape], RowFactors]


def factors_of(change: TensorChange, model: ModelShape) -> RowFactors | None:
    """What a format has the values multiplied by, unless it is 1."""
    found = change.factors(model) if isinstance(change, Multiplied) else None
    return None if found is None or found.are_ones else found


class PaddedWithFirstRow(RowMove):
    """Rows of the tokens that have embeddings for each layer, and behind them, in GGUF, the first one again for each
    other token of the vocabulary (Gemma 3n). llama.cpp's converter has zeros there."""

    def to_parts(self, values: Movable, model: ModelShape) -> tuple[Movable, ...]:
        rows: Any = values
        joined: Movable = concatenated([rows, *[rows[:1]] * (model.vocab_size - len(rows))])
        return (joined,)

    def to_hf(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        return parts[0][: model.per_layer_tokens]

    def hf_shape(self, shapes: Sequence[Shape], model: ModelShape) -> Shape:
        if shapes[0][:1] != (model.vocab_size,):
            raise no_parts(shapes)
        return (model.per_layer_tokens, *shapes[0][1:])


@dataclass(frozen=True)
class RotaryMove(RowMove):
    """The two rows of a rotary pair are `neighbours` in GGUF or in Hugging Face. In the other they are in two halves:
    Hugging Face's of a whole head, GGUF's of what turns of it, before what does not. `heads` is their number; None: as
    many as have the model's `kv_channels`."""

    neighbours: Literal["gguf", "hf"]
    heads: int | None = None

    def to_parts(self, values: Movable, model: ModelShape) -> tuple[Movable, ...]:
        return (self._exchanged(values, as_neighbours=self.neighbours == "gguf", model=model),)

    def to_hf(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        return self._exchanged(parts[0], as_neighbours=self.neighbours == "hf", model=model)

    def _exchanged(self, rows: Movable, *, as_neighbours: bool, model: ModelShape) -> Movable:
        size = model.kv_channels if self.heads is None else len(rows) // self.heads
        if size % 2 or not size or len(rows) % size or len(rows) % (self.heads or 1):
            raise DamagedCheckpoint(f"{len(rows)} rows are no heads of {size}, in pairs")
        by_head = rows.reshape(len(rows) // size, size, *rows.shape[1:])
        turned = size if self.neighbours == "gguf" else model.rotary_size
        turning, others = cut_into(by_head, [turned, size - turned], 1)
        return rows_of_groups(concatenated([pairs_exchanged(turning, as_neighbours=as_neighbours), others], 1))


class QKVOfGroups(RowMove):
    """Queries, keys and values in one tensor: in GGUF all queries, then all keys, then all values; in Hugging Face
    those of a group of queries, then those of the next (Falcon, GPT-NeoX, BLOOM)."""

    def to_parts(self, values: Movable, model: ModelShape) -> tuple[Movable, ...]:
        if len(values) != model.qkv_size:
            raise DamagedCheckpoint(f"{len(values)} rows are no {model.qkv_size} of queries, keys and values")
        return (concatenated(QKV.split(values, model)),)

    def to_hf(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        keys = model.num_query_groups * model.kv_channels
        return QKV.merge(cut_into(parts[0], [len(parts[0]) - 2 * keys, keys, keys]), model)


@dataclass(frozen=True)
class EqualParts(RowMove):
    """`count` parts of equally many rows; in Hugging Face one tensor, of all rows of the first, then of the second."""

    count: int

    def to_parts(self, values: Movable, model: ModelShape) -> tuple[Movable, ...]:
        if len(values) % self.count:
            raise DamagedCheckpoint(f"{len(values)} rows are no {self.count} tensors of equally many")
        return tuple(cut_into(values, [len(values) // self.count] * self.count))

    def to_hf(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        return concatenated(parts)


class GateUpInTurns(RowMove):
    """Two parts; in Hugging Face one tensor, whose rows are of the first and the second in turns (gpt-oss)."""

    def to_parts(self, values: Movable, model: ModelShape) -> tuple[Movable, ...]:
        return values[0::2], values[1::2]

    def to_hf(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        joined = concatenated([part[:, None] for part in parts], 1)
        return joined.reshape(2 * len(parts[0]), *parts[0].shape[1:])


class PlusOne(ValueChange):
    """A norm's weight, of which the part is 1 more."""

    computes: ClassVar[bool] = True

    def to_parts(self, values: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        return (values.float() + 1,)

    def to_hf(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        return parts[0].float() - 1


@dataclass(frozen=True)
class Decay(ValueChange):
    """A state's decay: in GGUF the number that multiplies the step, below zero but where a bound is (`sign`), in
    Hugging Face the logarithm of its amount (`A_log`)."""

    computes: ClassVar[bool] = True

    sign: int = -1

    def to_parts(self, values: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        return (self.sign * values.float().exp(),)

    def to_hf(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        return (self.sign * parts[0].float()).log()


class TransposedMatrix(ValueChange):
    """A matrix that is `[in, out]` in Hugging Face (GPT-2)."""

    def to_parts(self, values: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        return (values.t(),)

    def to_hf(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        return parts[0].t()

    def part_shapes(self, shape: Shape, model: ModelShape) -> tuple[Shape, ...]:
        return (shape[::-1],)

    def hf_shape(self, shapes: Sequence[Shape], model: ModelShape) -> Shape:
        if len(shapes[0]) != 2:
            raise no_parts(shapes)
        return shapes[0][::-1]


class Kernel(ValueChange):
    """The kernel of a convolution by channel: `[channels, width]` in GGUF, `[channels, 1, width]` in Hugging Face."""

    def to_parts(self, values: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        return (values.squeeze(1),)

    def to_hf(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        return parts[0].unsqueeze(1)

    def part_shapes(self, shape: Shape, model: ModelShape) -> tuple[Shape, ...]:
        return ((shape[0], *shape[2:]),)

    def hf_shape(self, shapes: Sequence[Shape], model: ModelShape) -> Shape:
        if len(shapes[0]) != 2:
            raise no_parts(shapes)
        return (shapes[0][0], 1, shapes[0][1])


@dataclass(frozen=True)
class OneDimensionMore(ValueChange):
    """The same values; in GGUF dimension `at` of `dimensions` is one of size 1, which Hugging Face's tensor lacks."""

    at: int
    dimensions: int

    def to_parts(self, values: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        return (values.unsqueeze(self.at),)

    def to_hf(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        return parts[0].squeeze(self.at)

    def part_shapes(self, shape: Shape, model: ModelShape) -> tuple[Shape, ...]:
        return ((*shape[: self.at], 1, *shape[self.at :]),)

    def hf_shape(self, shapes: Sequence[Shape], model: ModelShape) -> Shape:
        shape = shapes[0]
        if len(shape) != self.dimensions or shape[self.at] != 1:
            raise no_parts(shapes)
        return (*shape[: self.at], *shape[self.at + 1 :])


class LatentKeysValues(ValueChange):
    """What makes keys and values of the latent: in Hugging Face each head's key rows, then its value rows,
    `[heads * (key + value), latent]`; the parts are keys transposed by head, `[heads, latent, key]`, and values
    `[heads, value, latent]`."""

    def to_parts(self, values: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        assert model.mla
        key, value = model.mla.qk_head_dim, model.mla.v_head_dim
        keys, of_values = cut_into(values.reshape(-1, key + value, values.shape[-1]), [key, value], 1)
        return keys.transpose(1, 2), of_values

    def to_hf(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        return torch.cat([parts[0].transpose(1, 2), parts[1]], 1).flatten(0, 1)

    def alone(self, model: ModelShape) -> int:
        return model.num_attention_heads

    def part_shapes(self, shape: Shape, model: ModelShape) -> tuple[Shape, ...]:
        assert model.mla
        heads, key = model.num_attention_heads, model.mla.qk_head_dim
        return (heads, shape[1], key), (heads, shape[0] // heads - key, shape[1])

    def hf_shape(self, shapes: Sequence[Shape], model: ModelShape) -> Shape:
        keys, values = shapes
        fit = len(keys) == len(values) == 3 and (keys[0], keys[1]) == (values[0], values[2])
        if not fit or keys[0] != model.num_attention_heads:
            raise no_parts(shapes)
        return (keys[0] * (keys[2] + values[1]), keys[1])


@dataclass(frozen=True)
class Both(ValueChange):
    """One change of small tensors, then another one."""

    first: TensorChange
    second: TensorChange

    @property
    def computes(self) -> bool:
        return self.first.computes or self.second.computes

    def to_parts(self, values: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        (between,) = self.first.to_parts(values, model)
        return self.second.to_parts(between, model)

    def to_hf(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        between: Tensor = self.first.to_hf([self.second.to_hf(parts, model)], model)
        return between

    def part_shapes(self, shape: Shape, model: ModelShape) -> tuple[Shape, ...]:
        (between,) = self.first.part_shapes(shape, model)
        return self.second.part_shapes(between, model)

    def hf_shape(self, shapes: Sequence[Shape], model: ModelShape) -> Shape:
        return self.first.hf_shape([self.second.hf_shape(shapes, model)], model)


@dataclass(frozen=True)
class OfColumns(ValueChange):
    """Columns move as a `change` moves rows; rows of hidden states stay."""

    change: TensorChange

    def to_parts(self, values: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        return tuple(part.t() for part in self.change.to_parts(values.t(), model))

    def to_hf(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        moved: Tensor = self.change.to_hf([part.t() for part in parts], model)
        return moved.t()

    def alone(self, model: ModelShape) -> int:
        return model.hidden_size

    def hf_shape(self, shapes: Sequence[Shape], model: ModelShape) -> Shape:
        if len(shapes[0]) != 2 or shapes[0][0] != model.hidden_size:
            raise no_parts(shapes)
        self.change.hf_shape([shapes[0][::-1]], model)
        return shapes[0]


class GroupedNorm(ValueChange):
    """The norm of a mixer's output, a vector, in GGUF a row for each group of heads."""

    def to_parts(self, values: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        assert model.mamba
        return (values.view(model.mamba.num_groups, -1),)

    def to_hf(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        return parts[0].flatten()

    def part_shapes(self, shape: Shape, model: ModelShape) -> tuple[Shape, ...]:
        assert model.mamba
        return ((model.mamba.num_groups, shape[0] // model.mamba.num_groups),)

    def hf_shape(self, shapes: Sequence[Shape], model: ModelShape) -> Shape:
        assert model.mamba
        if len(shapes[0]) != 2 or shapes[0][0] != model.mamba.num_groups:
            raise no_parts(shapes)
        return (shapes[0][0] * shapes[0][1],)


def no_parts(shapes: Sequence[Shape]) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"tensors {', '.join(map(str, shapes))} do not make one")


SAME = AsItIs()
ROTARY_NEIGHBOURS, ROTARY_HALVES = RotaryMove("gguf"), RotaryMove("hf")
QKV_OF_GROUPS = QKVOfGroups()
TRANSPOSED = TransposedMatrix()
GATE_THEN_UP, THREE_EQUAL = EqualParts(2), EqualParts(3)
GATE_UP_IN_TURNS = GateUpInTurns()
PLUS_ONE = PlusOne()
DECAY, BOUNDED_DECAY = Decay(), Decay(sign=1)
KERNEL = Kernel()
KERNEL_IN_FOUR = OneDimensionMore(at=0, dimensions=4)
"""The same kernel with both dimensions of size 1, `[1, channels, 1, width]`."""
LATENT_KEYS_VALUES = LatentKeysValues()
VECTOR_AS_COLUMN = OneDimensionMore(at=1, dimensions=2)
"""A vector `[heads]`, in GGUF `[heads, 1]`."""
GROUPED_NORM = GroupedNorm()
