"""optimum-quanto's codes, read as values: INT8, FP8, and integers of four or two bits with a shift for each group.

Eight bits: `weight._data` I8 or FP8 `[out, in]` times `weight._scale` `[out, 1]`. Four or two: `weight._data._data` U8
holds the codes of a matrix `[n, group]`, the weight's elements in their order, whose rows are a part of all rows apart
in a byte, the first in the lowest bits; `weight._scale` and `weight._shift` are `[n, 1]`. A value is `code * scale -
shift`, each step in the dtype of the scales, or `(code - shift) * scale` where shifts are integers, and then rounded to
BF16. No tensor says what shape such a weight has: its family's table does. Source: optimum-quanto 0.2.7
(tensor/qbytes.py, tensor/qbits.py, tensor/packed.py, tensor/grouped.py; models/transformers_models.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from precisionctl.architectures.families import read_model, table_of
from precisionctl.architectures.param_map import names
from precisionctl.checkpoints.chunks import Box, read_box, read_rows
from precisionctl.checkpoints.decoded.base import DecodedWeights
from precisionctl.checkpoints.decoded.stacked_rows import StackedRows
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, PrecisionError, shown
from precisionctl.quant_methods.base import FLOATS
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

METHOD = "quanto"
QUANTIZATION_MAP = "quanto_qmap.json"
"""The file in which quanto says of each module what its weights and inputs are. It writes nothing into config.json."""

_BYTES: Mapping[DType, str] = {
    DType.int8: "INT8 codes",
    DType.float8_e4m3fn: "FP8 codes",
    DType.float8_e5m2: "FP8 codes",
}
_OF_INPUTS = ("input_scale", "output_scale")
_WITHOUT_SHAPES = "Let optimum-quanto decode them (`weight.dequantize()`), or start from the release in BF16."


class QuantoCodes(DecodedWeights):
    """The weights of a directory that optimum-quanto saved."""

    def _find(self, quantization: Mapping[str, Any]) -> None:
        specs = self._stored.specs
        weights = {name[: name.index(".weight._")] + ".weight" for name in specs if ".weight._" in name}
        found = {name: self._checked(name) for name in sorted(weights)}
        self.shapes = {name: shape for name, (shape, _) in found.items()}
        self._packed = {name: packed for name, (_, packed) in found.items() if packed}
        self.read = {name for name in specs if ".weight._" in name}
        modules = quantization.get("modules", {})
        for name in weights:
            module = name.removesuffix(".weight")
            scales = {f"{module}.{kind}" for kind in _OF_INPUTS} & specs.keys()
            said = modules.get(module) if isinstance(modules, Mapping) else None
            self.read |= scales
            if isinstance(said, Mapping) and said.get("activations") not in (None, "none"):
                self.behind = {*self.behind, *scales}
        self.kinds = {f"{packed.bits}-bit integers" for packed in self._packed.values()}
        self.kinds |= {_BYTES[specs[f"{name}._data"].dtype] for name in weights if f"{name}._data" in specs}

    def _values(self, name: str, row: int, rows: int) -> tuple[Tensor, str]:
        packed, columns = self._packed.get(name), self.specs[name].columns
        if packed is None:
            codes, scales = (read_rows(self._stored, f"{name}.{kind}", row, rows) for kind in ("_data", "_scale"))
            return codes.to(scales.dtype).mul_(scales), f"{name}._scale"
        made = []
        for box in packed.whole.run(row * columns, rows * columns):
            along = Box(box.row, box.rows, 0, 1)
            scales, shifts = (read_box(self._stored, f"{name}.{kind}", along) for kind in ("_scale", "_shift"))
            if shifts.is_floating_point():
                values = packed.codes(self._stored, box, scales.dtype).mul_(scales).sub_(shifts)
            else:
                values = packed.codes(self._stored, box, torch.int8).sub_(shifts.view(torch.int8)) * scales
            made.append(values.view(-1))
        return torch.cat(made), f"{name}._scale"

    def _checked(self, name: str) -> tuple[tuple[int, int], StackedRows | None]:
        """A weight's shape, and its codes if they are packed. Raises DamagedCheckpoint for tensors that are no codes of
        it, PrecisionError where nothing says its shape."""
        self._check_alone(name, f"{name}._data")
        specs, scale = self._stored.specs, self._present(f"{name}._scale")
        if f"{name}._data._data" not in specs:
            codes = self._present(f"{name}._data")
            if codes.dtype not in _BYTES or len(codes.shape) != 2 or not all(codes.shape):
                what = f"{name}._data is {codes.stored_dtype} of shape {shown(codes.shape)}, no codes of 8 bits"
                raise self._damaged(f"{name}._data", what)
            self._check(f"{name}._scale", (codes.rows, 1), *FLOATS)
            return (codes.rows, codes.columns), None
        if f"{name}._data" in specs:
            raise self._damaged(f"{name}._data", f"{name}._data is there, and as codes in groups: {name}._data._data")
        codes, groups = specs[f"{name}._data._data"], scale.rows
        held = [bits for bits in (4, 2) if codes.rows == -(-groups * bits // 8)]
        if codes.dtype != DType.uint8 or len(codes.shape) != 2 or not all(codes.shape) or len(held) != 1:
            what = f"{name}._data._data is {codes.stored_dtype} of shape {shown(codes.shape)}, beside {groups} scales"
            raise self._damaged(f"{name}._data._data", what)
        self._check(f"{name}._scale", (groups, 1), *FLOATS)
        self._check(f"{name}._shift", (groups, 1), scale.dtype, DType.int8, DType.uint8)
        shape = self._sizes.get(name)
        if shape is None:
            what = f"{name} has codes in groups, and no table here says what shape it has"
            raise PrecisionError(what, where=self._where, do=_WITHOUT_SHAPES)
        if len(shape) != 2 or prod(shape) != groups * codes.columns:
            what = f"{name} has {groups * codes.columns:,} codes, the model's sizes say {list(shape)}"
            raise DamagedCheckpoint(what, where=self._where)
        packed = StackedRows(f"{name}._data._data", groups, codes.columns, held[0], 8 // held[0], from_high=False)
        return (shape[0], shape[1]), packed

    @cached_property
    def _sizes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes that the model's table says, by name."""
        stored = self._stored.specs
        there = {name[: name.index(".weight._")] + ".weight" if ".weight._" in name else name for name in stored}
        model = read_model(self._config, self._where, there)
        found = dict[str, tuple[int, ...]]()
        for row in table_of(model).spelled({}, model):
            if row.present.in_layout("hf", model) and row.count(model) <= len(stored):
                for place in row.places(model):
                    found |= zip(names(row, "hf", place), row.shapes(model, "hf"), strict=True)
        return found
