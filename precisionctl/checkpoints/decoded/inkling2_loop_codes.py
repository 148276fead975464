"""The experts of Inkling 2 Mini (`inkling2_loop`), read as values: each stack of them is NVFP4 or MXFP8.

`mlp.experts.w13_weight` and `w2_weight` are codes `[experts, rows, bytes]`, with `..._scale` beside them:

- NVFP4 where there is an `..._amax`, `[experts]`: two E2M1 codes in a byte, the first in its low half, and a scale in
  E4M3 for 16 values of a row. A value is `(code * scale) * (amax / outer_scale_denominator)`, each step in FP32.
- else MXFP8: E4M3 codes, and exponents of two as bytes for 32 values of a row.

Values are rounded to BF16 at the end. No tensor of the release was seen: this is what transformers 5.24 makes of them
(core_model_loading.py, Inkling2LoopDequantizeExperts), which does the same in FP32. Asked for BF16, it also rounds an
`amax` in FP32 to BF16 as it loads it, which is not done here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from precisionctl.checkpoints.chunks import read_rows, read_tensor
from precisionctl.checkpoints.decoded.base import DecodedWeights
from precisionctl.codes import nibbles, numerics
from precisionctl.codes.elements import E2M1
from precisionctl.dtypes import DType
from precisionctl.quant_methods.base import FLOATS
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

METHOD = "inkling2_loop"
"""Our name for it as a `quant_method`. What the release's config.json says is not known; transformers asks none."""

_SCALE = re.compile(r"(.+\.experts\.w(?:13|2)_weight)_scale\[\d+\]")


def are_there(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a directory has such experts. As in transformers, its model and its tensors say so, whatever method
    config.json names."""
    return config.get("model_type") in (METHOD, f"{METHOD}_text") and any(map(_SCALE.fullmatch, names))


@dataclass(frozen=True)
class _Kind:
    """How many codes a byte has, how many values of a row share a scale, and the dtypes of both as stored."""

    words: str
    in_byte: int
    group: int
    codes: DType
    scale: DType


_NVFP4 = _Kind("NVFP4 codes", 2, 16, DType.uint8, DType.float8_e4m3fn)
_MXFP8 = _Kind("MXFP8 codes", 1, 32, DType.float8_e4m3fn, DType.uint8)


@dataclass(frozen=True)
class _ExpertCodes:
    """A weight `[rows, columns]`: one `expert` of a `stack`."""

    stack: str
    expert: int
    kind: _Kind
    shape: tuple[int, int]

    @property
    def scale(self) -> str:
        return f"{self.stack}_scale[{self.expert}]"


class Inkling2LoopCodes(DecodedWeights):
    """The experts of an Inkling 2 Mini."""

    def _find(self, quantization: Mapping[str, Any]) -> None:
        self._weights: dict[str, _ExpertCodes] = {}
        self.read = set[str]()
        experts = Counter(match[1] for match in map(_SCALE.fullmatch, self._stored.specs) if match)
        for stack, count in experts.items():
            factors, kind = _factors(stack), _MXFP8
            if not self._stored.specs.keys().isdisjoint(factors):
                kind = _NVFP4  # which has two numbers more for each stack: both, or none
                amaxes, denominators = factors
                for name, shapes in ((amaxes, [(count,)]), (denominators, [(), (1,), (count,)])):
                    spec = self._present(name)
                    if spec.shape not in shapes or spec.dtype not in FLOATS:
                        what = f"{name} is {spec.stored_dtype} of shape {list(spec.shape)}, for {count} experts"
                        raise self._damaged(name, what)
                self.read |= {*factors}
            for expert in range(count):
                coded = self._coded(stack, expert, kind)
                self._weights[f"{stack}[{expert}]"] = coded
                self.read.add(coded.scale)
        self.shapes = {name: coded.shape for name, coded in self._weights.items()}
        self.kinds = {coded.kind.words for coded in self._weights.values()}

    def _values(self, name: str, row: int, rows: int) -> tuple[Tensor, str]:
        coded = self._weights[name]
        codes, scale = (read_rows(self._stored, each, row, rows) for each in (name, coded.scale))
        if coded.kind is _MXFP8:
            groups = numerics.code_values(codes).view(*scale.shape, -1)
            return groups * scale.view(torch.float8_e8m0fnu).float().unsqueeze(-1), coded.scale
        values = torch.empty(rows, self.specs[name].columns)
        nibbles.decode(codes, E2M1, numerics.code_values(scale), values, torch.empty(nibbles.SCRATCH))
        whole, over = _factors(coded.stack)
        amax, denominator = (read_tensor(self._stored, each).float().reshape(-1) for each in (whole, over))
        self._checked_scales(whole, amax)
        self._checked_scales(over, denominator, over=True)
        factor = amax[coded.expert] / denominator[coded.expert if len(denominator) > 1 else 0]
        return values.mul_(factor), coded.scale

    def _coded(self, stack: str, expert: int, kind: _Kind) -> _ExpertCodes:
        """One of a stack. Raises DamagedCheckpoint for codes or scales of another shape or dtype than they have."""
        name = f"{stack}[{expert}]"
        codes = self._present(name)
        found = _ExpertCodes(stack, expert, kind, (codes.rows, kind.in_byte * codes.columns))
        scale, grid = self._present(found.scale), (codes.rows, found.shape[1] // kind.group)
        if len(codes.shape) != 2 or found.shape[1] % kind.group or scale.shape != grid:
            what = f"{name} is {list(codes.shape)}, with scales {list(scale.shape)}, not one for {kind.group} values"
            raise self._damaged(name, what)
        if (codes.dtype, scale.dtype) != (kind.codes, kind.scale):
            stored = f"{codes.stored_dtype} with scales in {scale.stored_dtype}"
            raise self._damaged(name, f"{name} is {stored}, not {kind.codes} with {kind.scale}")
        return found


def _factors(stack: str) -> tuple[str, str]:
    """The names of the two numbers that NVFP4 has for all of an expert."""
    return f"{stack}_amax", f"{stack}_outer_scale_denominator"
