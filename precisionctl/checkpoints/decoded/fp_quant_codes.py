"""FP-Quant's E2M1 codes of rotated weights (`quant_method: fp_quant`), read as values.

A linear has `qweight` U8 `[out, in / 2]`, the first code in the low half; `scales` U8, which are exponents of two of 32
inputs (`forward_dtype: mxfp4`) or E4M3 of 16 (`nvfp4`), `[out, in / group]` or, as its kernels leave them, with rows up
to a multiple of 128 and columns up to one of 4; `weight_global_scale` `[1]`, a divisor; and
`forward_hadamard_matrix` `[n, n]`. The model multiplies each `n` inputs by that matrix before the linear, so each `n`
columns of the weight are `(number * scale) @ matrix.T / global scale`: in FP64, where sums are exact, rounded to FP32
and then to BF16.
`dqweight`, which is stored in the place of codes (`pseudoquantization`), is `number * scale / global scale` already.
Source: fp_quant 0.3.2 (module/linear.py, linear_fns.py, FPQuant4x16NoMasterFn), FP-Quant d2e3092 (model_quant.py,
src/quantization/rtn.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from precisionctl.checkpoints.chunks import Box, read_box, read_rows, read_tensor
from precisionctl.checkpoints.decoded.base import DecodedWeights
from precisionctl.codes import nibbles
from precisionctl.codes.elements import E2M1
from precisionctl.dtypes import DType
from precisionctl.errors import shown
from precisionctl.quant_methods.base import FLOATS
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class _Rotated:
    """One of the formats: how many inputs share a scale, of which dtype it is, and what its codes are in words,
    and the values that are stored in their place."""

    group: int
    scale: DType
    words: str
    values: str


_FORMATS: Mapping[str, _Rotated] = {
    "mxfp4": _Rotated(32, DType.float8_e8m0fnu, "rotated MXFP4 codes", "rotated values rounded to MXFP4"),
    "nvfp4": _Rotated(16, DType.float8_e4m3fn, "rotated NVFP4 codes", "rotated values rounded to NVFP4"),
}
_CODES = ("qweight", "dqweight", "scales", "weight")
_MATRIX, _GLOBAL = "forward_hadamard_matrix", "weight_global_scale"
_OF_VALUES = ("qweight", "dqweight", "scales", _MATRIX, _GLOBAL)
_OF_INPUTS, _OF_GRADIENTS = "act_global_scale", "backward_hadamard_matrix"
_NOT_ROTATED_AGAIN = "There is no way back to that rotation."
_MOST_ROWS = 1024
"""Rows of a matrix, which has up to 128."""
_AS_GOOD_AS_ORTHOGONAL = 2**-6
"""How far a product of two rows of a matrix may be from 0 or 1. In BF16, as the model has it, it is up to 2^-7."""


class FPQuantCodes(DecodedWeights):
    """The weights of a directory that FP-Quant, or transformers with it, saved."""

    def _find(self, quantization: Mapping[str, Any]) -> None:
        specs, said = self._stored.specs, quantization.get("forward_dtype", "nvfp4")
        if not isinstance(said, str) or said not in _FORMATS:
            raise self._unread(f"`forward_dtype` {shown(said)}, which is not known")
        if self._switch(quantization, "store_master_weights", False):
            raise self._unread("weights to train, of which the model computes codes anew (`store_master_weights`)")
        self._format = _FORMATS[said]
        kinds = {name: name.rpartition(".")[2] for name in specs}
        # transformers leaves tensors of nothing where it has loaded and saved again
        of_nothing = {name for name, kind in kinds.items() if kind in _CODES and specs[name].shape == (0,)}
        there = {name for name, kind in kinds.items() if kind in _OF_VALUES} - of_nothing
        modules = {name.rpartition(".")[0] for name in there}
        self._of_bytes = {module for module in modules if f"{module}.dqweight" not in there}
        self.shapes = {f"{module}.weight": self._shape(module, of_nothing) for module in sorted(modules)}
        own = {name: kind for name, kind in kinds.items() if name.rpartition(".")[0] in modules}
        self.behind = {name for name, kind in own.items() if kind == _OF_INPUTS}
        self.read = {name for name, kind in own.items() if kind == _OF_GRADIENTS or name in of_nothing}
        self.read |= there | self.behind
        self.kinds = {self._format.words if module in self._of_bytes else self._format.values for module in modules}
        if modules and not self._of_bytes:
            self.way_back = _NOT_ROTATED_AGAIN

    def _values(self, name: str, row: int, rows: int) -> tuple[Tensor, str]:
        module, columns = name.removesuffix(".weight"), self.specs[name].columns
        matrix, divisor = self._once(module, self._back)
        if divisor is None:
            stored = read_rows(self._stored, f"{module}.dqweight", row, rows)
            values = stored.double().view(-1, len(matrix)).matmul(matrix)  # exact
            return values.float(), f"{module}.dqweight"
        here = Box(row, rows, 0, columns // self._format.group)
        stored = read_box(self._stored, f"{module}.scales", here).view(self._format.scale.torch)
        scales = self._checked_scales(f"{module}.scales", stored.float())
        scaled = torch.empty(rows, columns)
        codes = read_rows(self._stored, f"{module}.qweight", row, rows)
        nibbles.decode(codes, E2M1, scales, scaled, torch.empty(min(scaled.numel(), nibbles.SCRATCH)))
        values = scaled.double().view(-1, len(matrix)).matmul(matrix)  # exact
        return values.div_(divisor).float(), f"{module}.scales"

    def _back(self, module: str) -> tuple[Tensor, Tensor | None]:
        """What rotates a module's values back, FP64 `[n, n]`, and the global scale of its codes; None if they are no
        codes."""
        divisor = None
        if module in self._of_bytes:
            name = f"{module}.{_GLOBAL}"
            divisor = self._checked_scales(name, read_tensor(self._stored, name).double(), over=True)
        matrix = read_tensor(self._stored, f"{module}.{_MATRIX}").double().t().contiguous()
        beyond = (matrix.t().matmul(matrix) - torch.eye(len(matrix), dtype=matrix.dtype)).abs()
        if not bool((beyond <= _AS_GOOD_AS_ORTHOGONAL).all()):
            what = f"{module}.{_MATRIX} is no rotation: its rows are not orthogonal, or not of length 1"
            raise self._damaged(f"{module}.{_MATRIX}", what)
        return matrix, divisor

    def _shape(self, module: str, of_nothing: Set[str]) -> tuple[int, int]:
        """The shape of a weight, `[out, in]`. Raises DamagedCheckpoint for tensors that are no codes of it."""
        coded = module in self._of_bytes
        name = f"{module}.{'qweight' if coded else 'dqweight'}"
        if f"{module}.weight" not in of_nothing:
            self._check_alone(f"{module}.weight", name)
        if not coded and f"{module}.qweight" in self._stored.specs.keys() - of_nothing:
            raise self._damaged(name, f"{module} has a `qweight` and a `dqweight`")
        codes, size = self._present(name), self._present(f"{module}.{_MATRIX}").rows
        columns, group = codes.columns * (2 if coded else 1), self._format.group
        fits = codes.dtype in ((DType.uint8,) if coded else FLOATS) and len(codes.shape) == 2 and all(codes.shape)
        if not fits or not 0 < size <= _MOST_ROWS or columns % size or columns % group:
            what = f"{name} is {codes.stored_dtype} of shape {shown(codes.shape)}, beside a matrix of {size} rows"
            raise self._damaged(name, f"{what}: no {self._format.words}")
        self._check(f"{module}.{_MATRIX}", (size, size), *FLOATS)
        if coded:
            exact, padded = (codes.rows, columns // group), (-(-codes.rows // 128) * 128, -(-columns // group // 4) * 4)
            there = self._present(f"{module}.scales").shape
            self._check(f"{module}.scales", padded if there == padded else exact, DType.uint8)
            self._check(f"{module}.{_GLOBAL}", (1,), *FLOATS)
        return codes.rows, columns
