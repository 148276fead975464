"""How values stand in a Megatron tensor and in the Hugging Face tensors of the same row; each with its inverse.

`merge` makes Megatron's one tensor of Hugging Face's, `split` is its inverse. Where `moves_rows` holds, both only move
rows (dimension 0), so they work on values and on row numbers alike: `planning/segments.py` runs them on row numbers, an
array of NumPy's, to turn a row of the table into copies. Those that go by heads of attention are in
`head_rearrangements.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from precisionctl.errors import DamagedCheckpoint
from precisionctl.model.model_shape import ModelShape
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


Movable = TypeVar("Movable", "Tensor", "NDArray[Any]")
"""Values, or row numbers."""


class Rearrangement(Protocol):
    """How the tensors of a row go from Hugging Face to Megatron and back. Two that do the same are equal.

    - `merge`: Megatron's tensor of all ranks, `[rows, ...]`, from Hugging Face's, in the order of the row's names
    - `split`: its inverse
    - `moves_rows`: whether both only put rows into another order, or rows of zeros beside them, and compute nothing.
      Then they also take row numbers for rows, `[rows, 1]` for `[rows, ...]`, and so rows of scales and of adapters
    - `moves_single_rows`: of such a one, whether it leaves many rows without a neighbour. Copied one by one they would
      be slow, so conversions move them in memory
    """

    @property
    def moves_single_rows(self) -> bool: ...
    def merge(self, parts: Sequence[Any], model: ModelShape) -> Any: ...
    def split(self, whole: Any, model: ModelShape) -> tuple[Any, ...]: ...
    def moves_rows(self, model: ModelShape) -> bool: ...


def concatenated(parts: Sequence[Movable], axis: int = 0) -> Movable:
    """One after the other along an axis."""
    several: Any = tuple(parts)
    joined: Movable = np.concatenate(several, axis) if isinstance(parts[0], np.ndarray) else torch.cat(several, axis)
    return joined


def cut_into(whole: Movable, sizes: Sequence[int], axis: int = 0) -> list[Movable]:
    """The inverse, into parts of these sizes."""
    stops = [*accumulate(sizes)]
    spans = [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
    return [whole[(slice(None),) * axis + (span,)] for span in spans]


def rows_of_groups(grouped: Movable) -> Movable:
    """Rows of all groups, of `[groups, rows, ...]`."""
    return grouped.reshape(grouped.shape[0] * grouped.shape[1], *grouped.shape[2:])


def check_pairs(channels: int) -> None:
    """Raise DamagedCheckpoint for so many channels of a head if some has no other to turn with."""
    if channels % 2:
        what = f"{channels} channels of a head, of which no rotary pairs are made"
        raise DamagedCheckpoint(what, do="Is config.json this model's?")


def pairs_exchanged(heads: Movable, *, as_neighbours: bool) -> Movable:
    """Rotary pairs of heads, `[heads, rows, ...]`: the two rows of each, which are in the two halves of a head, become
    neighbours, or the other way round. Raises DamagedCheckpoint for an odd number of rows."""
    check_pairs(heads.shape[1])
    half = heads.shape[1] // 2
    order = (2, half) if as_neighbours else (half, 2)
    return heads.reshape(len(heads), *order, *heads.shape[2:]).swapaxes(1, 2).reshape(heads.shape)


class MovesRows:
    """The base of those that only move rows."""

    moves_single_rows = False

    def moves_rows(self, model: ModelShape) -> bool:
        return True


class MovesSingleRows(MovesRows):
    """The base of those that leave many rows without a neighbour."""

    moves_single_rows = True


class InOrder(MovesRows):
    """Hugging Face's tensors are the whole, one after the other."""

    def merge(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        return concatenated(parts)


class _Computation:
    moves_single_rows = False

    def moves_rows(self, model: ModelShape) -> bool:
        return False


@dataclass(frozen=True)
class Same(InOrder):
    """The same tensor."""

    def merge(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        return parts[0]

    def split(self, whole: Movable, model: ModelShape) -> tuple[Movable, ...]:
        return (whole,)


@dataclass(frozen=True)
class Vocabulary(MovesRows):
    """A row per token, of which a field of ModelShape is the number. Megatron pads it with zero rows, which are cut off
    whatever they hold."""

    tokens: str = "vocab_size"

    def merge(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        values: Any = parts[0]
        tokens: int = getattr(model, self.tokens)
        shape = (model.padded_vocab_size - tokens, *values.shape[1:])
        padding = np.zeros(shape, values.dtype) if isinstance(values, np.ndarray) else values.new_zeros(shape)
        joined: Movable = concatenated([values[:tokens], padding])
        return joined

    def split(self, whole: Movable, model: ModelShape) -> tuple[Movable, ...]:
        return (whole[: getattr(model, self.tokens)],)


@dataclass(frozen=True)
class FirstTwoLast(MovesRows):
    """The first two rows behind all others (OPT's table of positions)."""

    def merge(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        return concatenated([parts[0][2:], parts[0][:2]])

    def split(self, whole: Movable, model: ModelShape) -> tuple[Movable, ...]:
        return (concatenated([whole[-2:], whole[:-2]]),)


@dataclass(frozen=True)
class Halves(InOrder):
    """The two halves of a gated MLP's first linear: all of gate, then all of up."""

    def split(self, whole: Movable, model: ModelShape) -> tuple[Movable, ...]:
        return tuple(cut_into(whole, [len(whole) // 2] * 2))


@dataclass(frozen=True)
class DeltaNetByHead(MovesRows):
    """The input projection of a gated delta net. Megatron has all queries, then all keys, values, output gates (z),
    betas and alphas (`in_proj_parts` are their numbers of rows). Hugging Face has two tensors, the first with q, k, v
    and z, the second with beta and alpha, each ordered by key head: a head's rows of all kinds stand together
    (Qwen3-Next).
    """

    def merge(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        assert model.gdn
        heads = model.gdn.num_key_heads
        kinds: list[Movable] = []
        for part, sizes in zip(parts, (model.gdn.in_proj_parts[:4], model.gdn.in_proj_parts[4:]), strict=True):
            by_head = part.reshape(heads, -1, *part.shape[1:])
            kinds += cut_into(by_head, [size // heads for size in sizes], 1)
        return concatenated([rows_of_groups(kind) for kind in kinds])

    def split(self, whole: Movable, model: ModelShape) -> tuple[Movable, ...]:
        assert model.gdn
        kinds = cut_into(whole, model.gdn.in_proj_parts)
        by_head = [kind.reshape(model.gdn.num_key_heads, -1, *kind.shape[1:]) for kind in kinds]
        return tuple(rows_of_groups(concatenated(those, 1)) for those in (by_head[:4], by_head[4:]))


@dataclass(frozen=True)
class DeltaNetByKind(InOrder):
    """The same, of four tensors in Hugging Face: queries, keys and values; output gates; betas; alphas (Qwen3.5)."""

    def split(self, whole: Movable, model: ModelShape) -> tuple[Movable, ...]:
        assert model.gdn
        *of_conv, gates, betas, alphas = model.gdn.in_proj_parts
        return tuple(cut_into(whole, [sum(of_conv), gates, betas, alphas]))


@dataclass(frozen=True)
class ByPart(InOrder):
    """Hugging Face has a tensor for each part of Megatron's; `parts` is the field of ModelShape with their numbers of
    rows."""

    parts: str

    def split(self, whole: Movable, model: ModelShape) -> tuple[Movable, ...]:
        return tuple(cut_into(whole, attrgetter(self.parts)(model)))


@dataclass(frozen=True)
class Chunks(InOrder):
    """Hugging Face has so many tensors, of as many rows as `torch.chunk` gives them, whatever the parts are."""

    number: int

    def split(self, whole: Movable, model: ModelShape) -> tuple[Movable, ...]:
        rows = len(whole)
        high = -(-rows // self.number)
        return tuple(cut_into(whole, [max(0, min(high, rows - high * each)) for each in range(self.number)]))


@dataclass(frozen=True)
class Joined:
    """Hugging Face keeps the tensors of another rearrangement in one, one after the other."""

    inner: Rearrangement

    def merge(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        (joined,) = parts
        sizes = [len(part) for part in self.inner.split(np.empty((len(joined), 1)), model)]
        merged: Movable = self.inner.merge(cut_into(joined, sizes), model)
        return merged

    def split(self, whole: Movable, model: ModelShape) -> tuple[Movable, ...]:
        return (concatenated(self.inner.split(whole, model)),)

    @property
    def moves_single_rows(self) -> bool:
        return self.inner.moves_single_rows

    def moves_rows(self, model: ModelShape) -> bool:
        return self.inner.moves_rows(model)


@dataclass(frozen=True)
class Transposed(_Computation):
    """Hugging Face keeps the matrices of another rearrangement as `[in, out]`, Megatron as `[out, in]`."""

    inner: Rearrangement

    def merge(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        merged: Tensor = self.inner.merge([part.t() for part in parts], model)
        return merged.contiguous()

    def split(self, whole: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        return tuple(part.t().contiguous() for part in self.inner.split(whole, model))


@dataclass(frozen=True)
class Alternating(MovesSingleRows):
    """Hugging Face alternates rows of gate and up in one tensor; Megatron has all of gate, then all of up."""

    def merge(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        (pairs,) = parts
        return concatenated([pairs[0::2], pairs[1::2]])

    def split(self, whole: Movable, model: ModelShape) -> tuple[Movable, ...]:
        return (rows_of_groups(whole.reshape(2, len(whole) // 2, *whole.shape[1:]).swapaxes(0, 1)),)


@dataclass(frozen=True)
class Squeezed(_Computation):
    """Megatron's vector `[n]` has more dimensions in Hugging Face, all but one of size 1: `[1, n]`, or as `shape`
    says."""

    shape: tuple[int, ...] = (1, -1)

    def merge(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        return parts[0].flatten()

    def split(self, whole: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        return (whole.reshape(self.shape),)


@dataclass(frozen=True)
class Padded(_Computation):
    """Hugging Face fills a vector of so many numbers, a field of ModelShape, up to a `multiple` with zeros. Raises
    DamagedCheckpoint for other numbers there."""

    size: str
    multiple: int

    def merge(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        number = attrgetter(self.size)(model)
        if parts[0][number:].any():
            what = f"a vector of {number} numbers is filled up to {len(parts[0])} with others than zeros"
            raise DamagedCheckpoint(what, do="Copy the file again; nothing computes with these numbers.")
        return parts[0][:number]

    def split(self, whole: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        return (torch.cat([whole, whole.new_zeros(-len(whole) % self.multiple)]),)


@dataclass(frozen=True)
class Scalar(_Computation):
    """A single number: `[]` in Hugging Face, `[1]` in Megatron, as FSDP2 takes no tensor without dimensions."""

    def merge(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        return parts[0][None]

    def split(self, whole: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        return (whole.squeeze(0),)


@dataclass(frozen=True)
class OtherHalfFirst(_Computation):
    """A matrix in which the columns of the second half come first."""

    def merge(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        return torch.cat(parts[0].chunk(2, dim=1)[::-1], dim=1)

    def split(self, whole: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        return (self.merge((whole,), model),)


@dataclass(frozen=True)
class Gamma:
    """A norm's weight, which either side may store as its difference from 1; in Hugging Face not if it is `ordinary`,
    though the model's others are. The 1 is added or subtracted in FP32."""

    ordinary: bool = False
    moves_single_rows = False

    def merge(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        return self._shifted(parts[0], -self._less_in_megatron(model))

    def split(self, whole: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        return (self._shifted(whole, self._less_in_megatron(model)),)

    def moves_rows(self, model: ModelShape) -> bool:
        return not self._less_in_megatron(model)

    def _less_in_megatron(self, model: ModelShape) -> int:
        return model.zero_centered_gamma - (model.hf_zero_centered_gamma and not self.ordinary)

    def _shifted(self, values: Tensor, by: int) -> Tensor:
        return (values.float() + by).to(values.dtype) if by else values


SAME = Same()
VOCABULARY = Vocabulary()
FIRST_TWO_LAST = FirstTwoLast()
GATE_UP = Halves()
GAMMA = Gamma()
ORDINARY_GAMMA = Gamma(ordinary=True)
BY_HEAD = DeltaNetByHead()
BY_KIND = DeltaNetByKind()
THIRDS = Chunks(3)
SQUEEZED = Squeezed()
DELTA_NET_IN_PROJ = ByPart("gdn.in_proj_parts")
DELTA_NET_CONV = ByPart("gdn.conv_parts")
SCALAR = Scalar()
OTHER_HALF_FIRST = OtherHalfFirst()
