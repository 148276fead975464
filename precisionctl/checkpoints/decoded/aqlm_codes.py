"""AQLM's sums of vectors out of codebooks (`quant_method: aqlm`), read as values.

A linear has `codes` I8, I16 or I32 `[out / rows, in / columns, books]`, `codebooks` `[books, size, rows, columns]` and
`scales` `[out / rows, 1, 1, 1]`, where `rows` is usually 1; a code below zero is one of the upper half of the codebook.
A value is the sum of what its codes name in all codebooks, in FP32, rounded to their dtype, times the scale, rounded to
that dtype and then to BF16. Source: aqlm 1.1.7 (inference.py, QuantizedLinear; utils.py, _dequantize_weight,
unpack_int_data). Its sums of BF16 round a tie up; here the even one is taken, as CUDA does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from precisionctl.checkpoints.chunks import Box, read_rows, read_tensor
from precisionctl.checkpoints.decoded.base import DecodedWeights
from precisionctl.dtypes import DType
from precisionctl.errors import shown
from precisionctl.quant_methods.base import FLOATS
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = ("codes", "codebooks", "scales")
_WORDS: Mapping[DType, int] = {DType.int8: 8, DType.int16: 16, DType.int32: 32}


class AqlmCodes(DecodedWeights):
    """The weights of a directory that AQLM has saved."""

    def _find(self, quantization: Mapping[str, Any]) -> None:
        modules = self._modules_with(*_KINDS)
        shapes: dict[str, tuple[int, int]] = {}
        for module in modules:
            self._check_alone(f"{module}.weight", f"{module}.codes")
            codes, books = (self._present(f"{module}.{kind}") for kind in _KINDS[:2])
            fits = len(codes.shape) == 3 and len(books.shape) == 4 and 0 not in (*codes.shape, *books.shape)
            fits = fits and codes.dtype in _WORDS and books.dtype in FLOATS and codes.shape[2] == books.shape[0]
            size = books.shape[1] if fits else 0
            if not fits or size & size - 1 or size.bit_length() > _WORDS[codes.dtype] + 1:
                there = f"{codes.stored_dtype} of shape {shown(codes.shape)}, beside codebooks in {books.stored_dtype}"
                raise self._damaged(f"{module}.codes", f"{module}.codes is {there} of shape {shown(books.shape)}")
            self._check_small(f"{module}.codebooks")
            self._check(f"{module}.scales", (codes.rows, 1, 1, 1), books.dtype)
            shapes[f"{module}.weight"] = codes.rows * books.shape[2], codes.shape[1] * books.shape[3]
        self.shapes = shapes
        self.read = {f"{module}.{kind}" for module in modules for kind in _KINDS}
        sizes = {self._stored.specs[f"{module}.codebooks"].shape[:2] for module in modules}
        self.kinds = {f"{count}x{size.bit_length() - 1}-bit codes" for count, size in sizes}

    def _values(self, name: str, row: int, rows: int) -> tuple[Tensor, str]:
        module = name.removesuffix(".weight")
        all_books, made = self._once(module, self._books), []
        # rows of the weight as boxes: which rows of vectors they are in, and in the columns which outputs of these
        vectors = Box(0, self._stored.specs[f"{module}.codes"].rows, 0, all_books.shape[2])
        for cut in vectors.run(row, rows):
            books = all_books[:, :, cut.column : cut.column + cut.columns]
            codes = read_rows(self._stored, f"{module}.codes", cut.row, cut.rows).view(-1, len(books))
            sums = torch.zeros(len(codes), *books.shape[2:])
            for book, column in zip(books, codes.t(), strict=True):
                sums += book.index_select(0, column.int() & len(book) - 1)
            scales = read_rows(self._stored, f"{module}.scales", cut.row, cut.rows).view(-1, 1, 1, 1)
            values = sums.to(scales.dtype).view(cut.rows, -1, *sums.shape[1:]) * scales
            made.append(values.transpose(1, 2).reshape(cut.elements, -1))
        return torch.cat(made), f"{module}.scales"

    def _books(self, module: str) -> Tensor:
        """A module's codebooks, FP32."""
        shape = self._stored.specs[f"{module}.codebooks"].shape
        return read_tensor(self._stored, f"{module}.codebooks").float().view(shape)
