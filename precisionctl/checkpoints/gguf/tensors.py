"""The Hugging Face tensors of a GGUF file: decoded, and put together, as their rows are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from precisionctl.architectures.families import table_of
from precisionctl.architectures.param_map import names
from precisionctl.checkpoints.chunks import Chunk, in_pieces, read_rows, whole
from precisionctl.checkpoints.decoded.base import PIECE
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.global_scales import global_scales, is_scale
from precisionctl.checkpoints.gguf.head import GgufTensor, without_ones
from precisionctl.checkpoints.gguf.tensor_rows import GgufRow
from precisionctl.checkpoints.tensor_changes import SAME, AsItIs, Shape, TensorChange, factors_of
from precisionctl.codes import numerics
from precisionctl.codes.elements import Cast, ToDType
from precisionctl.codes.encoding import Encoding
from precisionctl.codes.ggml_blocks import ENCODED, blocks_of
from precisionctl.codes.row_factors import RoundedProducts, RowFactors
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, UnmappedTensor, at
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import TensorSpec, shared_spec
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

_APART = 8
"""Rows that lie at most so far apart are read in one piece."""
_SMALL = 1 << 24
"""Most values of a tensor that may have a dimension of 1: kernels, gates and biases."""
_MOST_SLICES = 1 << 19
"""Most tensors with stacks taken apart: a head of a few bytes can claim any number of experts."""


@dataclass(frozen=True)
class GgufPart:
    """A tensor of a file, or a slice of a stack, as bytes of its rows. `global_scale` is that of NVFP4. Raises
    DamagedCheckpoint for a tensor without rows, and for a vector in codes, of which ggml has none."""

    name: str
    tensor: GgufTensor
    global_scale: float = 1.0

    def __post_init__(self) -> None:
        in_codes = len(self.shape) == 1 and not self.tensor.format.dtype
        if in_codes or not self.shape[0]:
            what = f"`{self.name}` " + ("is a vector in codes" if in_codes else "has no rows")
            raise DamagedCheckpoint(what, where=self.tensor.file)

    @property
    def shape(self) -> Shape:
        return self.tensor.shape

    @property
    def dtype(self) -> DType:
        """That of its values: FP32 of codes."""
        return self.tensor.format.dtype or DType.float32

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        dtype, rows = self.tensor.format.dtype, self.shape[0]
        if dtype:
            return {self.name: shared_spec(self.shape, dtype)}
        return {self.name: shared_spec((rows, self.tensor.nbytes // rows), DType.uint8)}

    def chunks(self, name: str) -> Sequence[Chunk]:
        return [Chunk(whole(self.specs[name]), self.tensor.file, self.tensor.offset)]

    def rows(self, row: int, rows: int) -> Tensor:
        """Rows `[row, row + rows)` as values `[rows, ...]`. Raises DamagedCheckpoint where codes stand for none."""
        if self.tensor.format.dtype:
            return read_rows(self, self.name, row, rows).view(rows, *self.shape[1:])
        made = []
        for first, count in in_pieces(row, rows, prod(self.shape[1:]), PIECE):
            codes = read_rows(self, self.name, first, count).numpy()
            values = torch.from_numpy(self.tensor.format.values_of(codes, self.global_scale))
            if numerics.has_nan(values) or numerics.has_infinity(values):
                what = f"`{self.name}` has values that are infinite or NaN, by its codes and scales"
                raise DamagedCheckpoint(what, where=self.tensor.file, do="Copy the file again.")
            made.append(values)
        return (made[0] if len(made) == 1 else torch.cat(made)).view(rows, *self.shape[1:])


@dataclass(frozen=True)
class ChangedTensor:
    """A Hugging Face tensor that is made of `parts` by a `change`."""

    parts: Sequence[GgufPart]
    change: TensorChange
    model: ModelShape

    @cached_property
    def spec(self) -> TensorSpec:
        shape = self.change.hf_shape([part.shape for part in self.parts], self.model)
        dtypes = [part.dtype for part in self.parts]
        as_stored = not self.change.computes and self.factors is None
        return shared_spec(shape, reduce(DType.promoted, dtypes) if as_stored else DType.float32)

    @cached_property
    def factors(self) -> RowFactors | None:
        return factors_of(self.change, self.model)

    @cached_property
    def cast(self) -> Cast | None:
        """How ggml makes its codes, if they are of formats that are made here, or what rounds products."""
        formats, casts = [part.tensor.format for part in self.parts], list[Cast]()
        for form in formats:
            if form.dtype is None and form.name not in ENCODED:
                return None
            casts.append(ToDType(form.dtype) if form.dtype else blocks_of(form))
        if self.factors:
            return RoundedProducts(self.factors, casts[0])
        if all(form.dtype for form in formats):
            return None
        if self.change.moves_rows and len({*formats}) == 1:
            return casts[0]
        return CastOfParts(casts, self.change, self.model, self.spec.rows // self.change.alone(self.model))

    @property
    def decoded_from(self) -> str:
        """The formats of its parts, in words; empty where all are values."""
        if self.cast:
            return self.cast.in_words
        formats = [part.tensor.format for part in self.parts]
        in_words = dict.fromkeys(form.dtype.value if form.dtype else form.name for form in formats)
        return "" if all(form.dtype for form in formats) else " and ".join(in_words)

    def chunks(self) -> Sequence[Chunk]:
        if self.change is SAME and self.parts[0].tensor.format.dtype:
            return self.parts[0].chunks(self.parts[0].name)
        return [Chunk(whole(self.spec), self)]

    def rows(self, row: int, rows: int) -> Tensor:
        """Rows `[row, row + rows)` as `[rows, columns]`."""
        if isinstance(self.change, AsItIs):
            found = self.parts[0].rows(row, rows)
            found = self.factors.divided(found, row) if self.factors else found
        elif self.change.moves_rows:
            found = self._moved(self._order[row : row + rows])
        else:
            alone = self.change.alone(self.model)
            each = self.spec.rows // alone
            first, stop = row // each, -(-(row + rows) // each)
            parts = []
            for part in self.parts:  # each is as many equal runs of rows as the tensor
                of_run = part.shape[0] // alone
                parts.append(part.rows(first * of_run, (stop - first) * of_run))
            found = self.change.to_hf(parts, self.model)[row - first * each :][:rows]
        return found.reshape(rows, -1).to(self.spec.dtype.torch)

    @cached_property
    def _order(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """For each row, its number in the parts, one after the other."""
        numbers, start = [], 0
        for part in self.parts:
            numbers.append(np.arange(start, start + part.shape[0]))
            start += part.shape[0]
        order: np.ndarray[tuple[int], np.dtype[np.int64]] = self.change.to_hf(numbers, self.model)
        return order

    def _moved(self, numbers: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
        """Rows of the parts by their numbers, as `_order` counts them."""
        found = torch.empty(len(numbers), *self.spec.shape[1:], dtype=self.spec.dtype.torch)
        start = 0
        for part in self.parts:
            for first, count in _runs(numbers[(numbers >= start) & (numbers < start + part.shape[0])] - start):
                here = (numbers >= start + first) & (numbers < start + first + count)
                values = part.rows(first, count)[torch.from_numpy(numbers[here] - start - first)]
                found[torch.from_numpy(here)] = values.to(found.dtype)
            start += part.shape[0]
        return found


class ChangedTensors:
    """The Hugging Face tensors that are `made` of those of files, by name: the part of a Reader that has tensors."""

    encodings: Mapping[str, Encoding] = {}

    def __init__(self, made: Mapping[str, ChangedTensor]) -> None:
        self._made = made
        self.specs: Mapping[str, TensorSpec] = {name: tensor.spec for name, tensor in made.items()}

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self._made[name].chunks()

    def cast(self, name: str) -> Cast | None:
        return self._made[name].cast

    def decoded_from(self, name: str) -> str:
        return self._made[name].decoded_from


@dataclass(frozen=True, eq=False)
class CastOfParts(Cast):
    """Codes of the parts of a tensor, each by its own of `casts`, whose rows are none of theirs, or in several formats,
    as a `change` makes them of `rows_together`. Where rows are no whole blocks, a part is values."""

    casts: Sequence[Cast]
    change: TensorChange
    model: ModelShape
    rows_together: int

    @property
    def in_words(self) -> str:
        return " and ".join(dict.fromkeys(cast.in_words for cast in self.casts))

    @property
    def share_a_scale(self) -> int | None:
        return max(cast.share_a_scale or 0 for cast in self.casts)

    def rounded(self, values: Tensor) -> Tensor:
        made = []
        for together in torch.split(values, self.rows_together):
            parts = [part.contiguous() for part in self.change.to_parts(together, self.model)]
            coded = [
                cast.rounded(part.view(-1, part.shape[-1])).view(part.shape)
                for cast, part in zip(self.casts, parts, strict=True)
            ]
            made.append(self.change.to_hf(coded, self.model))
        return torch.cat(made).reshape(values.shape)


def _runs(numbers: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Iterator[tuple[int, int]]:
    """Runs of rows that are read at once, the first row of each and its number of rows, which have these numbers."""
    if not len(numbers):
        return
    ordered = np.sort(numbers)
    ends = np.flatnonzero(np.diff(ordered) > _APART)
    firsts, lasts = ordered[[0, *(ends + 1)]], ordered[[*ends, -1]]
    yield from zip(firsts.tolist(), (lasts - firsts + 1).tolist(), strict=True)


def hf_tensors(
    tensors: Mapping[str, GgufTensor], family: GgufFamily, model: ModelShape, where: object
) -> dict[str, ChangedTensor]:
    """The Hugging Face tensors that these are of, by name.

    Raises UnmappedTensor for one that the family does not have, DamagedCheckpoint where parts of one are missing or do
    not fit, or a tensor is there and is a part of another one too.
    """
    found = dict[str, tuple[GgufRow, dict[str, GgufPart]]]()
    for part in _slices(tensors, family, model, where):
        named = family.tensors.of_gguf(part.name, model)
        if named is None:
            what = f"`{part.name}` is no tensor of a model of the architecture {family.architecture}"
            raise UnmappedTensor(what, where=where, do="docs/gguf.md says what is read. Start from the release.")
        row, hf = named
        parts = found.setdefault(hf, (row, {}))[1]
        parts[part.name] = part
    made, shapes = dict[str, ChangedTensor](), _hf_shapes(model, len(found))
    for hf, (row, parts) in found.items():
        needed = family.tensors.of_hf(hf, model)
        assert needed is not None
        if missing := [name for name in needed[1] if name not in parts]:
            raise DamagedCheckpoint(f"no `{missing[0]}` beside `{next(iter(parts))}`", where=where)
        there = [parts[name] for name in needed[1]]
        if hf in shapes and (isinstance(row.change, AsItIs) or not row.change.moves_rows):
            for number, shape in enumerate(row.change.part_shapes(shapes[hf], model)):
                part = there[number]
                if part.shape != shape and part.shape == without_ones(shape):  # as llama-quantize leaves them out
                    there[number] = replace(part, tensor=replace(part.tensor, shape=shape))
        made[hf] = ChangedTensor(there, row.change, model)
        with at(where):
            _ = made[hf].spec
    return made


def _hf_shapes(model: ModelShape, most: int) -> dict[str, Shape]:
    """The shapes of a model's smaller tensors by name, those with a dimension of 1 among them, but no experts'. Rows of
    more than `most` places are passed over, as metadata may claim more layers than there are tensors."""
    spelled = (row for row in table_of(model).spelled({}, model) if not row.of_experts)
    return {
        name: shape
        for row in spelled
        if row.present.in_layout("hf", model) and 0 < row.count(model) <= most and prod(row.shape(model)) <= _SMALL
        for place in row.places(model)
        for name, shape in zip(names(row, "hf", place), row.shapes(model, "hf"), strict=True)
    }


def _slices(
    tensors: Mapping[str, GgufTensor], family: GgufFamily, model: ModelShape, where: object
) -> Iterator[GgufPart]:
    """The tensors, with stacks of experts taken apart, and without scales, which their weights have."""
    scaling = (name for name in tensors if is_scale(name, tensors) and family.tensors.of_gguf(name, model) is None)
    scales, count = {name: tensors[name] for name in scaling}, 0
    for name, tensor in tensors.items():
        if name in scales:
            continue
        if "[" in name:
            raise DamagedCheckpoint(f"`{name}` is named as a slice of another tensor", where=where)
        stacked = family.tensors.of_gguf(f"{name}[0]", model) is not None
        of_one = 2 if name.endswith(".weight") else 1
        if stacked and model.moe and model.moe.num_experts == 1 and len(tensor.shape) == of_one:
            tensor = replace(tensor, shape=(1, *tensor.shape))  # which llama-quantize leaves out
        slices = tensor.shape[0] if stacked and len(tensor.shape) > 1 else 1
        count += slices
        if not slices or count > _MOST_SLICES:
            raise DamagedCheckpoint(f"`{name}` is a stack of {slices}", where=where)
        if not stacked or len(tensor.shape) == 1:
            yield GgufPart(name, tensor, *global_scales(name, scales, 1, where))
            continue
        one = replace(tensor, shape=tensor.shape[1:])
        for expert, scale in enumerate(global_scales(name, scales, slices, where)):
            part = replace(one, offset=tensor.offset + expert * one.nbytes)
            yield GgufPart(f"{name}[{expert}]", part, scale)
