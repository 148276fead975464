"""HQQ's integers of 1 to 8 bits (`quant_method: hqq`), read as values.

The flattened weight `[out, in]` is a matrix `[n, group]` with a scale and a zero point for each row (`axis` 1), or
`[group, n]` with one for each column (`axis` 0). `W_q` has several rows of it in one, the first in the highest bits: a
byte has those of 8, 4, 2 or 1 bits, an int32 ten of 3 bits; its rows follow one another as `W_q`'s, then those in the
next lower bits. `shape`, `axis`, `group_size`, `packing` and `compute_dtype` are tensors too, the last two of letters.
A value is `(code - zero) * scale`, each step in the dtype that the module computed in when it was saved, and then
rounded to BF16. Source: hqq 0.2.8 (core/quantize.py, HQQLinear.state_dict, Quantizer.dequantize; core/bitpack.py;
core/utils.py, encode_safetensor_type).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from precisionctl.checkpoints.chunks import Box, read_box, read_bytes, read_tensor
from precisionctl.checkpoints.decoded.base import DecodedWeights
from precisionctl.checkpoints.decoded.stacked_rows import PACKINGS, StackedRows
from precisionctl.dtypes import DType
from precisionctl.errors import shown
from precisionctl.quant_methods.base import FLOATS
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor


METHOD = "hqq"
"""Its `quant_method`, which transformers writes. hqq itself writes none."""


_LONGEST = 32
"""Letters of a packing or a dtype."""
_SETTINGS = (
    *("nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale"),
    *("quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise"),
    *("optimize", "round_zero"),
)
_NOT_READ = ("view_as_float", "quant_scale", "quant_zero", "offload_meta")
"""Switches by which codes and scales are stored otherwise."""


@dataclass(frozen=True)
class _Grouped:
    """A weight's name and shape, the matrix in which its codes are packed, along which axis of it there is one scale,
    and the dtype that is computed in."""

    module: str
    shape: tuple[int, int]
    packed: StackedRows
    axis: int
    dtype: DType


class HqqCodes(DecodedWeights):
    """The weights of a directory with HQQ's modules in safetensors."""

    def _find(self, quantization: Mapping[str, Any]) -> None:
        modules = self._modules_with("W_q")
        self._weights = {f"{module}.weight": self._grouped(module) for module in modules}
        self.shapes = {name: grouped.shape for name, grouped in self._weights.items()}
        kinds = ("W_q", "scale", "zero", *_SETTINGS)
        self.read = {f"{module}.{kind}" for module in modules for kind in kinds}
        self.kinds = {f"{grouped.packed.bits}-bit integers" for grouped in self._weights.values()}

    def _values(self, name: str, row: int, rows: int) -> tuple[Tensor, str]:
        grouped, columns = self._weights[name], self.specs[name].columns
        dtype, made = grouped.dtype.torch, []
        for box in grouped.packed.whole.run(row * columns, rows * columns):
            along = Box(box.row, box.rows, 0, 1) if grouped.axis else Box(0, 1, box.column, box.columns)
            zeros, scales = (read_box(self._stored, f"{grouped.module}.{kind}", along) for kind in ("zero", "scale"))
            values = grouped.packed.codes(self._stored, box, dtype).sub_(zeros.to(dtype)).mul_(scales.to(dtype))
            made.append(values.view(-1))
        return torch.cat(made), f"{grouped.module}.scale"

    def _grouped(self, module: str) -> _Grouped:
        """What a module's tensors say, checked. Raises PrecisionError for codes that are packed otherwise."""
        self._check_alone(f"{module}.weight", f"{module}.W_q")
        for switch in _NOT_READ:
            if f"{module}.{switch}" in self._stored.specs and self._number(f"{module}.{switch}"):
                raise self._unread(f"codes of HQQ with `{switch}`, as those of {module}, which are not read")
        packing, computed = self._word(f"{module}.packing"), self._word(f"{module}.compute_dtype")
        if packing not in PACKINGS or (dtype := computed.removeprefix("torch.")) not in map(str, FLOATS):
            raise self._unread(f"codes of HQQ packed as {shown(packing)}, computed in {shown(computed)}")
        self._check(f"{module}.shape", (2,), DType.int64)
        out, inputs = (int(size) for size in read_tensor(self._stored, f"{module}.shape").view(-1))
        axis, group = self._number(f"{module}.axis"), self._number(f"{module}.group_size")
        if min(out, inputs, group) < 1 or axis not in (0, 1) or out * inputs % group:
            what = f"{module} has codes of [{out}, {inputs}] in groups of {group} along axis {axis}"
            raise self._damaged(f"{module}.shape", what)
        sizes = (out * inputs // group, group) if axis else (group, out * inputs // group)
        bits, in_word, word = PACKINGS[packing]
        packed = StackedRows(f"{module}.W_q", *sizes, bits, in_word, from_high=True)
        self._check(packed.name, (packed.held, packed.columns), word)
        for kind in ("scale", "zero"):
            self._check(f"{module}.{kind}", (sizes[0], 1) if axis else (1, sizes[1]), *FLOATS)
        return _Grouped(module, (out, inputs), packed, axis, DType(dtype))

    def _word(self, name: str) -> str:
        """The letters of a tensor."""
        spec = self._present(name)
        if spec.dtype != DType.uint8 or len(spec.shape) != 1 or not 0 < spec.rows <= _LONGEST:
            what = f"{name} is {spec.stored_dtype} of shape {shown(spec.shape)}, not up to {_LONGEST} letters"
            raise self._damaged(name, what)
        return read_bytes(self._stored, name, 0, spec.rows).tobytes().decode("latin-1")

    def _number(self, name: str) -> int:
        self._check(name, (), DType.int32, DType.uint8)
        return int(read_tensor(self._stored, name))
