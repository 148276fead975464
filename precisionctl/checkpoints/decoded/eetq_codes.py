"""EETQ's INT8 codes (`quant_method: eetq`), read as values.

A linear has `weight` I8 `[in, out]`, whose bytes are in the order that its GEMM takes them, and `weight_scales`
`[out]`. Of the transpose `[out, in]`, each 64 inputs of two outputs follow one another; of each 16 inputs, the first
half has the even places and the second half the odd ones. A byte is a code plus 128. A value is `code * scale` in the
dtype of the scales, rounded to BF16. This is the order for GPUs from Turing to Ada. Nothing says that codes are in that
for others, but that each output has a code of -128 or 127: the value that its scale is made of. Source: transformers
5.24 (integrations/eetq.py), EETQ 465e972 (csrc/cutlass_kernels/cutlass_preprocessors.cc, symmetric_quantize,
preprocess_weights_for_mixed_gemm).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from precisionctl.checkpoints.chunks import Box, read_box, read_rows
from precisionctl.checkpoints.decoded.base import DecodedWeights
from precisionctl.dtypes import DType
from precisionctl.errors import shown
from precisionctl.quant_methods.base import FLOATS
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

_SCALES = ".weight_scales"
_TILE, _TOGETHER = 64, 2
"""Inputs of an output that follow one another, and outputs that take turns."""
_IN_ORDER = 16
"""Inputs of which the first half have the even places, the second half the odd ones."""


class EetqCodes(DecodedWeights):
    """The weights of a directory that transformers saved with EETQ."""

    def _find(self, quantization: Mapping[str, Any]) -> None:
        specs = self._stored.specs
        scales = {name.removesuffix("_scales"): name for name in specs if name.endswith(_SCALES)}
        for name, spec in specs.items():
            if name.endswith(".weight") and spec.dtype == DType.int8 and name not in scales:
                self._present(f"{name}_scales")
        shapes: dict[str, tuple[int, int]] = {}
        for name, scale in scales.items():
            codes = self._present(name)
            fits = codes.dtype == DType.int8 and len(codes.shape) == 2 and all(codes.shape)
            if not fits or codes.rows % _TILE or codes.columns % _TILE:
                what = f"{name} is {codes.stored_dtype} of shape {shown(codes.shape)}, no codes in tiles of {_TILE}"
                raise self._damaged(name, what)
            self._check(scale, (codes.columns,), *FLOATS)
            shapes[name] = codes.columns, codes.rows
        self.shapes = shapes
        self.read = {*scales, *scales.values()}
        self.kinds = {"INT8 codes"}

    def _values(self, name: str, row: int, rows: int) -> tuple[Tensor, str]:
        columns, spec = self.specs[name].columns, self._stored.specs[name]
        first = row // _TOGETHER * _TOGETHER
        count = -(-(row + rows - first) // _TOGETHER) * _TOGETHER
        boxes = Box(0, spec.rows, 0, spec.columns).run(first * columns, count * columns)
        words = torch.cat([read_box(self._stored, name, box).view(-1) for box in boxes])
        tiles = words.view(-1, columns // _TILE, _TOGETHER, _TILE).transpose(1, 2)
        halves = tiles.reshape(count, -1, _IN_ORDER // 2, 2)[row - first :][:rows].transpose(2, 3)
        numbers = (halves.reshape(rows, columns).view(torch.uint8) ^ 128).view(torch.int8)
        stored = read_rows(self._stored, f"{name}_scales", row, rows).view(-1, 1)
        scales = self._checked_scales(f"{name}_scales", stored)
        full = (numbers == -128).any(1, keepdim=True) | (numbers == 127).any(1, keepdim=True)
        if not bool((full | (scales == 0)).all()):
            raise self._unread(f"{name} has codes in an order that is not read, such as that for GPUs before Turing")
        return numbers.to(scales.dtype).mul_(scales), f"{name}_scales"
