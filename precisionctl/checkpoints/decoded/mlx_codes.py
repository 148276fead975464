"""MLX's codes, read as values: integers under a scale and a bias of a group, MXFP4, MXFP8 and NVFP4.

A module has `weight` U32 `[out, in * bits / 32]`, whose rows are the bits of codes one after another, the first in the
lowest; `scales` `[out, in / group]`; and, of integers, `biases` of the same shape, and dtype as `scales`.

- affine: `code * scale + bias`, each step rounded to the dtype of the scales. So do `mx.dequantize` and
  `mlx_lm.convert --dequantize`. (On Metal, products of vectors and of large matrices take `code * scale + bias` in FP32
  instead: of 8 bits, the two roundings to BF16 are about as large as those to the codes.)
- mxfp4, mxfp8: E2M1 or E4M3 codes, exponents of two as bytes for 32 values of a row.
- nvfp4: E2M1 codes, scales in E4M3 as bytes for 16, times `global_scale / 2688` where a stack of experts has one.

The result is rounded to BF16. Weights that mlx-lm has cut, turned or added one to are put together again, of parts that
`mlx/mlx_names.py` has named. Sources: MLX 0.32 (ops.cpp, affine_dequantize, fp_dequantize; kernels/quantized.h,
fp_quantized.h; nn/layers/quantized.py), mlx-lm 0.32 (utils.py, load_model, quantize_model).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from precisionctl.checkpoints.chunks import read_rows, read_tensor
from precisionctl.checkpoints.decoded.base import DecodedWeights
from precisionctl.checkpoints.decoded.mlx_parts import NormPlusOne, OfHeads, WeightPart, weights_in_parts
from precisionctl.codes.elements import Cast
from precisionctl.codes.group_scales import NVFP4_LARGEST
from precisionctl.codes.mlx_groups import (
    MODES,
    MlxGroups,
    affine_values,
    codes_in_words,
    float_values,
    mlx_groups,
    scale_values,
)
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, shown
from precisionctl.quant_methods.base import FLOATS
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

METHOD = "mlx"
"""Our name for it as a `quant_method`. MLX's own key of config.json is `quantization`, which names none."""

_OF_INPUTS = ("quantize_input",)
"""Keys of a module that say nothing of its weight."""


@dataclass(frozen=True)
class _MlxFormat:
    """What the config says of a module; `scaled`: that it has a `global_scale`."""

    mode: str
    bits: int
    group: int
    scaled: bool

    @property
    def affine(self) -> bool:
        return MODES[self.mode].affine

    @property
    def words(self) -> str:
        return codes_in_words(self.mode, self.bits)


class MlxCodes(DecodedWeights):
    """The weights of a directory that mlx-lm quantized, under the names of published files. The config has its
    settings, and those of modules' own, by their names."""

    way_back = "`export-inference --target mlx` makes new codes of these values, perhaps others."

    def _find(self, quantization: Mapping[str, Any]) -> None:
        specs = self._stored.specs
        # the dtype of which floats were made, whose scales do not say it: that of the tensors which are no codes. Some
        # of these are FP32 in models of 16 bits
        stored = {spec.dtype for spec in specs.values()}
        possible = (dtype for dtype in (DType.float16, DType.bfloat16, DType.float32) if dtype in stored)
        self._uncoded = next(possible, DType.bfloat16)

        self._formats: dict[str, _MlxFormat] = {}
        if modules := [name.removesuffix(".scales") for name in specs if name.endswith(".scales")]:
            usual = self._format("`quantization`", quantization, own=False)
            for module in modules:
                said = quantization.get(module, True)
                if said is False:
                    what = f"{module}.scales is there, and config.json says that {module} is not quantized"
                    raise DamagedCheckpoint(what, where=self._where)
                self._formats[f"{module}.weight"] = usual if said is True else self._format(module, said, own=True)
        coded = {name: self._shape(name, form) for name, form in self._formats.items()}
        self.read = {name for weight, form in self._formats.items() for name in self._tensors_beside(weight, form)}
        self.kinds = {form.words for form in self._formats.values()} or {"weights in parts"}
        self._made = weights_in_parts({name: spec.shape for name, spec in specs.items()} | coded, self._where)
        for weight, parts in self._made.items():
            self._check_alone(weight, parts[0].name)
            for name in (part.name for part in parts if part.name not in coded):
                if specs[name].dtype not in FLOATS:
                    what = f"{name} is {specs[name].stored_dtype}, no part of a weight"
                    raise self._damaged(name, what)
            self.read |= {part.name for part in parts}
        self.shapes: dict[str, tuple[int, ...]] = {
            name: shape for name, shape in coded.items() if name not in self.read
        }
        for name, parts in self._made.items():
            self.shapes[name] = (sum(part.of_weight[0] for part in parts), *parts[0].of_weight[1:])
        for name, spec in specs.items():
            if name.endswith(".weight") and spec.dtype == DType.uint32 and name not in self._formats:
                self._present(f"{name.removesuffix('weight')}scales")
            if name.endswith(".biases") and name not in self.read:
                what = f"{name} is there, and no integers that it could belong to"
                raise self._damaged(name, what, "Is every shard there?")

    def rows(self, name: str, row: int, rows: int) -> Tensor:
        if name not in self._made:
            return super().rows(name, row, rows)
        parts = self._made[name]
        if parts[0].how == "alternating":
            first, stop = row // len(parts), -(-(row + rows) // len(parts))
            every = torch.stack([self._of_part(part, first, stop - first) for part in parts], 1).flatten(0, 1)
            return every[row - first * len(parts) :][:rows]
        made, start = [], 0
        for part in parts:
            stop = start + part.of_weight[0]
            first, end = max(row, start), min(row + rows, stop)
            if first < end:
                made.append(self._of_part(part, first - start, end - first))
            start = stop
        return torch.cat(made)

    def cast(self, name: str) -> Cast | None:
        if name not in self._made:
            return self._groups(name)
        parts = self._made[name]
        if parts[0].how == "plus_one":
            return NormPlusOne()
        if parts[0].how == "turned":
            keys, values = parts[:2]
            columns, key_rows = keys.shape
            return OfHeads(key_rows, columns, values.shape[0], self._groups(keys.name), self._groups(values.name))
        groups = {self._groups(part.name) for part in parts}
        return groups.pop() if len(groups) == 1 else None

    def _groups(self, name: str) -> MlxGroups | None:
        """How MLX makes the codes of a tensor; None where it is values, or codes under a scale of the whole."""
        form = self._formats.get(name)
        if form is None or _beside(name, "global_scale") in self.read:
            return None
        values = self._stored.specs[_beside(name, "scales")].dtype if form.affine else self._uncoded
        return mlx_groups(form.mode, form.bits, form.group, values)

    def _of_part(self, part: WeightPart, row: int, rows: int) -> Tensor:
        """Rows of a weight, as far as they are a part's, BF16 `[rows, columns]`."""
        turned = part.how == "turned"
        first, count = (0, part.shape[0]) if turned else (row, rows)
        if part.name in self._formats:
            values = self._decoded(part.name, first, count, part.shape[1])
        else:
            values = read_rows(self._stored, part.name, first, count)
        if part.how == "plus_one":
            values = values.float() - 1
        return values.t()[row : row + rows].bfloat16() if turned else values.bfloat16()

    def _values(self, name: str, row: int, rows: int) -> tuple[Tensor, str]:
        form, scales_at = self._formats[name], _beside(name, "scales")
        codes, scales = (read_rows(self._stored, each, row, rows) for each in (name, scales_at))
        codes = codes.view(torch.uint8)
        if form.affine:
            biases = read_rows(self._stored, _beside(name, "biases"), row, rows)
            return affine_values(codes, form.bits, scales, biases), scales_at
        by = scale_values(scales, form.mode)
        if (whole := _beside(name, "global_scale")) in self.read:
            by *= read_tensor(self._stored, whole) / NVFP4_LARGEST
        return float_values(codes, form.bits, by), scales_at

    def _format(self, of: str, said: object, *, own: bool) -> _MlxFormat:
        """The settings `of` a module, or of all. A module's own may lack any key, and then have MLX's default."""
        if not isinstance(said, Mapping) or not (own or {"group_size", "bits"} <= said.keys()):
            what = f"{of} is {shown(said)}, not an object with `group_size` and `bits`"
            raise DamagedCheckpoint(what, where=self._where)
        known = ("mode", "bits", "group_size", "global_scale", *_OF_INPUTS)
        if other := next((key for key in said if own and key not in known), None):
            raise self._unread(f"codes of MLX with `{other}` {shown(said[other])} ({of}), which are not read")
        name = said.get("mode", "affine")
        if not isinstance(name, str) or name not in MODES:
            raise self._unread(f"codes of MLX in the mode {shown(name)} ({of}), which is not read")
        mode = MODES[name]
        bits, group = said.get("bits") or mode.bits[0], said.get("group_size") or mode.groups[0]
        for key, value, possible in (("bits", bits, mode.bits), ("group_size", group, mode.groups)):
            if type(value) is not int or value not in possible:
                what = f"codes of MLX with `{key}` {shown(value)} ({of}), which the mode {name} does not have"
                raise self._unread(what)
        scaled = said.get("global_scale") or False
        if scaled is not False and (scaled is not True or name != "nvfp4"):
            raise self._unread(f"codes of MLX with `global_scale` {shown(scaled)} ({of}) in the mode {name}")
        return _MlxFormat(name, bits, group, scaled)

    def _tensors_beside(self, weight: str, form: _MlxFormat) -> list[str]:
        """The tensors beside the codes of a weight."""
        scales, biases, whole = (_beside(weight, kind) for kind in ("scales", "biases", "global_scale"))
        if form.affine:
            return [scales, biases]
        scaled = form.scaled or (form.mode == "nvfp4" and whole in self._stored.specs)
        return [scales, whole] if scaled else [scales]

    def _shape(self, name: str, form: _MlxFormat) -> tuple[int, ...]:
        """The shape of a weight. Raises DamagedCheckpoint for tensors that are not such codes."""
        parts = {name: self._present(name)} | {part: self._present(part) for part in self._tensors_beside(name, form)}
        codes, scales, *others = parts.values()
        shape = (codes.rows, form.group * scales.columns)
        fits = len(codes.shape) == len(scales.shape) == 2 and codes.rows == scales.rows and 0 not in shape
        fits = fits and codes.dtype == DType.uint32 and 32 * codes.columns == form.bits * shape[1]
        fits = fits and scales.dtype in (FLOATS if form.affine else (DType.uint8,))
        for other in others:
            fits = fits and (other == scales if form.affine else (other.shape, other.dtype) == ((), DType.float32))
        if not fits:
            there = ", ".join(f"{part} {spec.stored_dtype} {shown(spec.shape)}" for part, spec in parts.items())
            what = f"{there}, which are no {form.words} in groups of {form.group}, as config.json says"
            raise DamagedCheckpoint(what, where=self._where)
        return shape


def _beside(weight: str, kind: str) -> str:
    return f"{weight.removesuffix('weight')}{kind}"
