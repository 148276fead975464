"""BitNet's weights of -1, 0 and 1 (`quant_method: bitnet`), read as values.

A linear has `weight` U8 `[out / 4, in]`: of a byte, the lowest two bits are the code of the row that it stands in, the
next two that of the row `out / 4` further on, and so on; a code is the number plus one. `weight_scale` `[1]` is what
outputs are divided by (`linear_class: bitlinear`, as Falcon3's), or multiplied by (`autobitlinear`, as that of
microsoft/bitnet-b1.58-2B-4T). So a value is the number over or times the scale in BF16, rounded to BF16. What
transformers has loaded and saved again of the latter are the numbers themselves, beside their scale. Source:
transformers 5.24 (integrations/bitnet.py, unpack_weights, BitLinear, AutoBitLinear, BitNetDeserialize).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from precisionctl.architectures.read_off import why_not_gemms
from precisionctl.checkpoints.chunks import read_rows, read_tensor
from precisionctl.checkpoints.decoded.base import DecodedWeights
from precisionctl.dtypes import DType
from precisionctl.errors import PrecisionError, shown
from precisionctl.quant_methods.base import FLOATS
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

_IN_BYTE = 4
_CLASSES = ("bitlinear", "autobitlinear")


class BitNetCodes(DecodedWeights):
    """The weights of a BitNet directory."""

    def _find(self, quantization: Mapping[str, Any]) -> None:
        specs = self._stored.specs
        # With other settings than these a model computes with other weights than are stored
        said, mode = quantization.get("linear_class", _CLASSES[0]), quantization.get("quantization_mode", "offline")
        if not isinstance(said, str) or said not in _CLASSES or mode not in ("offline", "online"):
            what = f"`linear_class` {shown(said)} with `quantization_mode` {shown(mode)}, which are not known"
            raise self._unread(what)
        self._multiplies = said == "autobitlinear"
        if self._multiplies and mode == "online":
            what = "weights to train, of which the model computes -1, 0 and 1 anew in each step (`online`)"
            do = "Start from the packed release. Without `quantization_config` in config.json they are read as stored."
            raise PrecisionError(what, where=self._where, do=do)
        if self._switch(quantization, "use_rms_norm", False):
            raise self._unread("`use_rms_norm`, norms of inputs within linears, which are not read")

        scales = {name.removesuffix("_scale"): name for name in specs if name.endswith(".weight_scale")}
        for weight, scale in scales.items():
            codes = self._present(weight)
            numbers = codes.dtype == DType.uint8 or (self._multiplies and codes.dtype in FLOATS)
            if not numbers or len(codes.shape) != 2 or not all(codes.shape):
                what = f"{weight} is {codes.stored_dtype} of shape {shown(codes.shape)}, no codes of two bits"
                raise self._damaged(weight, what)
            self._check(scale, () if specs[scale].shape == () else (1,), *FLOATS)
        for name, spec in specs.items():
            if name.endswith(".weight") and spec.dtype == DType.uint8 and name not in scales:
                self._present(f"{name}_scale")
        if any(specs[name].dtype != DType.uint8 for name in scales):  # bare numbers look like values
            modules = quantization.get("modules_to_not_convert")
            left_out = [each for each in modules if isinstance(each, str)] if isinstance(modules, list) else []
            for name in sorted(specs.keys() - scales.keys() - why_not_gemms(specs).keys()):
                if not any(part in name.removesuffix(".weight") for part in left_out):
                    self._present(f"{name}_scale")
        packed = {name: _IN_BYTE if specs[name].dtype == DType.uint8 else 1 for name in scales}
        self.shapes = {name: (specs[name].rows * codes, specs[name].columns) for name, codes in packed.items()}
        self.read = {*scales, *scales.values()}
        self.kinds = {"ternary codes"}

    def _values(self, name: str, row: int, rows: int) -> tuple[Tensor, str]:
        spec = self._stored.specs[name]
        if spec.dtype != DType.uint8:
            numbers = read_rows(self._stored, name, row, rows).bfloat16().float()
            return numbers.mul_(self._scale(name)), f"{name}_scale"
        values, runs = self._once(name, self._of_bytes), []
        for quarter in range(row // spec.rows, (row + rows - 1) // spec.rows + 1):  # rows that are in the same two bits
            first, stop = max(row - quarter * spec.rows, 0), min(row + rows - quarter * spec.rows, spec.rows)
            packed = read_rows(self._stored, name, first, stop - first)
            runs.append(values[quarter].index_select(0, packed.view(-1).int()).view(packed.shape))
        return torch.cat(runs), f"{name}_scale"

    def _of_bytes(self, name: str) -> Tensor:
        """The values of all bytes, BF16 `[4, 256]`, of each of their codes."""
        scale, numbers = self._scale(name), torch.arange(-1.0, 3.0)
        values = (numbers * scale if self._multiplies else numbers / scale).bfloat16()
        shifts = torch.arange(_IN_BYTE).unsqueeze(1) * 2
        return values[torch.arange(256).unsqueeze(0) >> shifts & 3]

    def _scale(self, name: str) -> Tensor:
        scale = read_tensor(self._stored, f"{name}_scale").bfloat16().float()
        return self._checked_scales(f"{name}_scale", scale, over=not self._multiplies)
