"""SINQ's integers of 1 to 8 bits (`quant_method: sinq`), read as values: HQQ's, with a second scale for each input.

The weight `[out, in]` is a matrix `[n, group]` with a scale and a zero point for each row, packed into `W_q` as HQQ
packs it; `meta.scale2` `[1, in]` are the scales of inputs. `meta.scale` and `meta.zero` are `[n, 1]`, or codes of one
byte themselves: `x` U8 `[m, k]`, `s` and `m` `[1, k]`, of which the former is `x * s + m`, flattened. What is no tensor
is in a file beside the index, by module. A value is `(code - zero) * scale * scale2`: codes are of the dtype that the
module computed in, each step in the dtype that PyTorch promotes to, and the value is rounded to the former and then to
BF16. Source: sinq 0.2.0 (quantizer.py, Quantizer.dequantize, dq8; bitpack.py; patch_model.py,
save_weights_safetensors).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.decoded.base import DecodedWeights
from precisionctl.checkpoints.decoded.stacked_rows import PACKINGS, StackedRows
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, damage, shown
from precisionctl.quant_methods.base import FLOATS
from precisionctl.torch_when_used import torch
from precisionctl.untrusted.safe_pickle import sizes

if TYPE_CHECKING:
    from torch import Tensor

METHOD = "sinq"
MODULES = "model.safetensors.index.json.meta.json"
"""The file in which sinq says of each module how its weight is coded. It may write nothing into config.json."""

_PACKINGS = {**PACKINGS, "6bit_32": (6, 5, DType.int32), "5bit_32": (5, 6, DType.int32)}
"""HQQ's, and two of SINQ's own."""
_TABLES = ("nf3", "nf4")
"""In the name of a method: codes are numbers of a table, and not themselves."""
_OF_CODES = ("x", "s", "m")
_BUFFERS = (".rotary_emb.inv_freq", ".rotary_emb.original_inv_freq")
"""What sinq saves with the weights, and a model computes of its config."""


def are_there(names: Collection[str]) -> bool:
    """Whether tensors of these names are SINQ's. Others have a `W_q` too."""
    return any(name.endswith(".meta.scale2") for name in names)


@dataclass(frozen=True)
class _Scaled:
    """A weight's shape, the matrix in which its codes are packed, and the dtype of its values."""

    shape: tuple[int, int]
    packed: StackedRows
    dtype: DType


class SinqCodes(DecodedWeights):
    """The weights of a directory that SINQ has saved."""

    def _find(self, quantization: Mapping[str, Any]) -> None:
        modules = self._modules_with("W_q")
        said = self._objects({MODULES: quantization.get("modules")}, MODULES)
        self.read = {name for name in self._stored.specs if name.endswith((".W_q", *_BUFFERS))}
        self._weights = {f"{module}.weight": self._scaled(module, said.get(module)) for module in modules}
        scales = (f"{module}.meta.{kind}" for module in modules for kind in ("scale", "zero"))
        self.read |= {name for each in scales for name in (each, *_coded(each)) if name in self._stored.specs}
        self.read |= {f"{module}.meta.scale2" for module in modules}
        self.shapes = {name: scaled.shape for name, scaled in self._weights.items()}
        self.kinds = {f"{scaled.packed.bits}-bit integers" for scaled in self._weights.values()}

    def _values(self, name: str, row: int, rows: int) -> tuple[Tensor, str]:
        scaled, module = self._weights[name], name.removesuffix(".weight")
        scales, zeros, of_inputs = self._once(module, self._all_scales)
        boxes, parts = scaled.packed.whole.run(row * scaled.shape[1], rows * scaled.shape[1]), []
        for box in boxes:
            codes, here = scaled.packed.codes(self._stored, box, scaled.dtype.torch), slice(box.row, box.row + box.rows)
            parts.append(((codes - zeros[here]) * scales[here]).view(-1))
        values = torch.cat(parts).view(rows, -1) * of_inputs
        return values.to(scaled.dtype.torch), f"{module}.meta.scale"

    def _all_scales(self, module: str) -> tuple[Tensor, Tensor, Tensor]:
        """The scales and zero points of a module's groups, `[n, 1]`, and the scales of its inputs, `[1, in]`."""
        of_groups = []
        for plain in (f"{module}.meta.scale", f"{module}.meta.zero"):
            if plain in self._stored.specs:
                of_groups.append(read_tensor(self._stored, plain))
            else:
                codes, steps, least = (read_tensor(self._stored, name) for name in _coded(plain))
                of_groups.append((codes * steps + least).view(-1, 1))
        scales, zeros = of_groups
        return scales, zeros, read_tensor(self._stored, f"{module}.meta.scale2").view(1, -1)

    def _scaled(self, module: str, said: Mapping[str, Any] | None) -> _Scaled:
        """What is said of a module, checked. Raises PrecisionError for codes that are not read."""
        self._check_alone(f"{module}.weight", f"{module}.W_q")
        meta = said.get("meta") if said else None
        if not isinstance(meta, Mapping):
            what = f"{module} has codes of SINQ, and {MODULES} does not say which"
            raise DamagedCheckpoint(what, where=self._where, do="Is it beside the weights?")
        method, packing, computed = (str(meta.get(key)) for key in ("method", "packing", "compute_dtype"))
        as_float, of_table = self._switch(meta, "view_as_float", False), any(each in method.lower() for each in _TABLES)
        if as_float or of_table or packing not in _PACKINGS:
            what = f"codes of SINQ packed as {shown(packing)} by {shown(method)}, as those of {module}"
            raise self._unread(f"{what}, which are not read")
        if (dtype := computed.removeprefix("torch.")) not in map(str, FLOATS):
            raise self._unread(f"codes of SINQ computed in {shown(computed)}")
        with damage(f"what {MODULES} says of {shown(module)} makes no sense", self._where):
            (out, inputs), (axis, group) = sizes(meta["shape"]), sizes([meta["axis"], meta["group_size"]])
            if min(out, inputs, group) < 1 or axis != 1 or out * inputs % group:
                raise ValueError(f"codes of [{out}, {inputs}] in groups of {group} along axis {axis}")
        if len(self._present(f"{module}.meta.scale2").shape) == 3:
            raise self._unread(f"codes of SINQ in square tiles, as those of {module}")
        bits, in_word, word = _PACKINGS[packing]
        packed = StackedRows(f"{module}.W_q", out * inputs // group, group, bits, in_word, from_high=True)
        self._check(packed.name, (packed.held, group), word)
        self._check(f"{module}.meta.scale2", (1, inputs), *FLOATS)
        for kind in ("scale", "zero"):
            self._check_of_rows(f"{module}.meta.{kind}", packed.rows)
        return _Scaled((out, inputs), packed, DType(dtype))

    def _check_of_rows(self, name: str, rows: int) -> None:
        """Raise DamagedCheckpoint for scales or zero points of other than so many rows, or that are there twice."""
        coded = sorted(self._stored.specs.keys() & _coded(name))
        if not coded:
            self._check(name, (rows, 1), *FLOATS)
            return
        if name in self._stored.specs:
            raise self._damaged(name, f"{name} is there, and as codes: {coded[0]}")
        wide = self._present(f"{name}.x").columns
        self._check(f"{name}.x", (rows // wide if wide and not rows % wide else rows, wide), DType.uint8)
        for part in _OF_CODES[1:]:
            self._check(f"{name}.{part}", (1, wide), *FLOATS)


def _coded(name: str) -> tuple[str, ...]:
    """The tensors of scales or zero points that are codes themselves."""
    return tuple(f"{name}.{part}" for part in _OF_CODES)
