"""The integers of transformers for Apple's GPUs (`quant_method: metal`), read as values.

A linear has `weight` U32 `[out, in * bits / 32]`, the first code in the lowest bits, and `scales` and `qbiases`
`[out, in / group]`. A value is `code * scale + bias` in FP32, rounded to the dtype of the scales and then to BF16, as
transformers decodes them where there is no such GPU. Source: transformers 5.24 (integrations/metal_quantization.py,
_affine_dequantize_tensor, MetalDequantize).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from precisionctl.checkpoints.chunks import read_rows
from precisionctl.checkpoints.decoded.base import DecodedWeights
from precisionctl.codes.mlx_groups import affine_values
from precisionctl.dtypes import DType
from precisionctl.errors import shown
from precisionctl.quant_methods.base import FLOATS
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

METHOD = "metal"
"""Its `quant_method`: words and scales have the names that MLX gives its own."""

_BITS = (2, 4, 8)


class MetalCodes(DecodedWeights):
    """The weights of a directory that transformers saved for Apple's GPUs."""

    def _find(self, quantization: Mapping[str, Any]) -> None:
        specs = self._stored.specs
        self._bits, group = (quantization.get(key, usual) for key, usual in (("bits", 4), ("group_size", 64)))
        if type(self._bits) is not int or self._bits not in _BITS or type(group) is not int or group < 1:
            what = f"codes of {shown(self._bits)} bits in groups of {shown(group)}, which are not read"
            raise self._unread(what)
        names = {name.rpartition(".")[0] for name in specs if name.endswith((".scales", ".qbiases"))}
        words = (name for name, spec in specs.items() if name.endswith(".weight") and spec.dtype == DType.uint32)
        modules = sorted(names | {name.removesuffix(".weight") for name in words})
        shapes: dict[str, tuple[int, int]] = {}
        for module in modules:
            codes, scales = self._present(f"{module}.weight"), self._present(f"{module}.scales")
            columns = codes.columns * 32 // self._bits
            fits = codes.dtype == DType.uint32 and len(codes.shape) == 2 and all(codes.shape) and not columns % group
            if not fits or scales.dtype not in FLOATS:
                what = (
                    f"{module}.weight is {codes.stored_dtype} of shape {shown(codes.shape)}, beside scales in "
                    f"{scales.stored_dtype}: no codes of {self._bits} bits in groups of {group}"
                )
                raise self._damaged(f"{module}.weight", what)
            for kind in ("scales", "qbiases"):
                self._check(f"{module}.{kind}", (codes.rows, columns // group), scales.dtype)
            shapes[f"{module}.weight"] = codes.rows, columns
        self.shapes = shapes
        self.read = {f"{module}.{kind}" for module in modules for kind in ("weight", "scales", "qbiases")}
        self.kinds = {f"{self._bits}-bit integers"}

    def _values(self, name: str, row: int, rows: int) -> tuple[Tensor, str]:
        scales_at, biases_at = (f"{name.removesuffix('weight')}{kind}" for kind in ("scales", "qbiases"))
        codes, scales, biases = (read_rows(self._stored, each, row, rows) for each in (name, scales_at, biases_at))
        values = affine_values(codes.view(torch.uint8), self._bits, scales.float(), biases.float())
        return values.to(scales.dtype), scales_at
