"""Encode weights: a first pass over a job's values finds the scales, a second one makes the codes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from precisionctl.checkpoints.chunks import Chunked, in_pieces, read_rows
from precisionctl.codes import numerics, zero_points
from precisionctl.codes.blocks import BlockScales, share, share_global
from precisionctl.codes.elements import CodesInRows
from precisionctl.codes.encoding import Encoding, scale_dtype
from precisionctl.codes.statistics import UNDERFLOW
from precisionctl.conversion.buffers import Buffers
from precisionctl.conversion.outcome import Outcome
from precisionctl.dtypes import DType
from precisionctl.errors import BROKEN_WEIGHTS, PrecisionError
from precisionctl.param import TensorSpec
from precisionctl.planning.plan import Encode
from precisionctl.quant_methods.scales import Scales
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

_IN_BF16 = "BF16 has a number for it: choose that."

ValuePiece = tuple[str, int, "Tensor"]
"""Name and first row of the tensor to write, and values `[rows, columns]` in a buffer that the next piece reuses."""

Put = Callable[[str, int, "Tensor"], None]
"""Writes rows of a tensor: called with its name, the first row's number, and the rows in the target's dtype."""

Read = Callable[[str, int, int], Iterable[tuple[int, "Tensor"]]]
"""Reads rows of a source's tensor, in pieces: called with its name, the first row and the number of rows; yields each
piece with the number of rows before it."""


@dataclass
class _Underflows:
    """Counts a tensor's elements that became zero, in one row of 16. Counting all would add a tenth to the time of
    a cast, and if an outlier spoils a scale, most rows show it."""

    elements: int = 0
    zeroed: int = 0

    def see(self, values: Tensor, codes: Tensor) -> None:
        values, codes = values[::16], codes[::16]
        self.elements += codes.numel()
        self.zeroed += numerics.underflows(values, codes)

    @property
    def share(self) -> float:
        return self.zeroed / self.elements if self.elements else 0.0


class Encoder:
    """Encodes jobs of a plan into tensors of these `specs`, which are written by `put`.

    `carried` are the encodings that values had before, by the target's names: blocks whose values have not changed keep
    their scales. `read` reads weights that other jobs encode but that share a scale with this job's. `before` has the
    codes that weights had, by the same names, if they are still stored somewhere. `refuses_infinity`: a number that
    rounding makes infinite is an error.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        carried: Mapping[str, Encoding],
        buffers: Buffers,
        put: Put,
        read: Read,
        before: Chunked | None = None,
        refuses_infinity: bool = True,
    ) -> None:
        self._specs, self._carried, self._buffers, self._put, self._read = specs, carried, buffers, put, read
        self._before, self._refuses_infinity = before, refuses_infinity
        self.found = Outcome()
        """What was found out; the Worker puts a new one here for each job."""

    def encode(self, encode: Encode, pieces: Callable[[], Iterable[ValuePiece]]) -> None:
        """Write the codes and scales of the values that `pieces` yields, each time it is called. If each row has its
        own scale and none is carried, one pass is enough.

        Raises PrecisionError for an infinite weight.
        """
        seen = self._first_pass(encode, pieces)
        made = {name: self._encoding_of(name, found, encode) for name, found in seen.items()}
        searched = {name for name, found in seen.items() if found.searches}
        changed = dict.fromkeys((name for name, found in seen.items() if found.carried and not found.fits.all()), 0)
        underflows = {name: _Underflows() for name in encode.weights if self._specs[name].element.is_fp8}
        for name, row, values in pieces():
            if name not in encode.weights:
                self.put_values(name, row, values)
                continue
            encoding = made.get(name) or self._by_row(name, row, values, encode)
            first = row if name in made else 0
            if name in searched:
                encoding, first = seen[name].searched(values, row, encoding, self._buffers.scratch), 0
                self._put_grid(encode.weights[name], encoding, row)
            codes = self._buffers.to_write(encoding.element.dtype, len(values), self._specs[name].width)
            encoding.encode_rows(values, first, codes, self._buffers.scratch)
            if name in changed:
                now = encoding.of_rows(first, len(values))
                changed[name] += self._changed(name, row, codes, values, seen[name], now)
            if name in underflows:  # with steps of one size, or sixteen numbers, many values become zero anyway
                underflows[name].see(values, codes)
            self._put(name, row, codes)
        self.found.zeroed |= {name: each.share for name, each in underflows.items() if each.share > UNDERFLOW}
        self.found.changed |= changed
        self.found.rounded |= {name for name, found in seen.items() if not found.exact}
        self.put_known(encode)

    def _changed(self, name: str, row: int, codes: Tensor, values: Tensor, seen: BlockScales, now: Encoding) -> int:
        """How many codes differ from the codes before. If those are no longer stored, from the codes that the old
        scales would give."""
        stored = self._before.specs.get(name) if self._before else None
        if self._before is None or stored is None or stored != replace(self._specs[name], parallel=stored.parallel):
            return seen.changed(values, codes, row, now)
        before = read_rows(self._before, name, row, len(codes))
        return stored.element.differing(before, codes)

    def _first_pass(self, encode: Encode, pieces: Callable[[], Iterable[ValuePiece]]) -> dict[str, BlockScales]:
        """Find the scales of each tensor, except those whose scales are found row by row in the second pass."""
        seen = {
            name: self._scales_of(name, scales.block, scales)
            for name, scales in encode.weights.items()
            if not self._is_by_row(name, encode)
        }
        for name, row, values in pieces() if seen else ():
            if name in seen:
                seen[name].see(values, row, self._buffers.scratch)
        for name, found in seen.items():
            _check_finite(name, found.amax)
            if found.has_nan:
                if not found.element.is_fp8:
                    what = f"`{name}` holds a NaN, for which {found.element.name} has no code"
                    raise PrecisionError(what, do=BROKEN_WEIGHTS)
                self.found.with_nan.add(name)
        sharing = [*seen.values()]
        for name, source in encode.alongside.items():  # weights of other jobs with the same scale
            spec, like = self._specs[name], next(iter(encode.weights.values()))
            whole = (spec.rows, spec.columns)
            sharing.append(self._scales_of(name, like.block if like.global_scale else whole, like))
            for row, values in self._read(source, 0, spec.rows):
                sharing[-1].see(values, row, self._buffers.scratch)
        if encode.shared and not any(scales.global_scale for scales in encode.weights.values()):
            share(sharing)
        share_global([found for found in sharing if found.divides is not None], always=encode.shared)
        return seen

    def _scales_of(self, name: str, block: tuple[int, int], like: Scales) -> BlockScales:
        """The BlockScales that find a weight's scales in blocks of this size. Global scale and zero points are stored
        as in `like`."""
        spec, divides = self._specs[name], like.global_divides
        shifted = like.zero_points is not None
        return BlockScales(spec.rows, spec.columns, block, spec.element, self._carried.get(name), divides, shifted)

    def _is_by_row(self, name: str, encode: Encode) -> bool:
        """Whether each row has a scale of its own, FP32 and none that is carried."""
        spec, scales = self._specs[name], encode.weights[name]
        fp32 = self._specs[scales.weight].dtype == DType.float32
        return scales.block == (1, spec.columns) and fp32 and spec.packing is None and name not in self._carried

    def _encoding_of(self, name: str, found: BlockScales, encode: Encode) -> Encoding:
        """The encoding of a tensor after the first pass. The parts that are final by now are written."""
        dtype = scale_dtype(self._specs[encode.weights[name].weight].dtype)
        encoding = found.settle(dtype.torch, encode.numbers)
        if not found.searches:
            self._put_grid(encode.weights[name], encoding)
        self._put_further(name, encode.weights[name], encoding)
        return encoding

    def _by_row(self, name: str, row: int, values: Tensor, encode: Encode) -> Encoding:
        """The encoding of rows that each have a scale of their own, from their own amax. The scales are written."""
        element = self._specs[name].element
        amax, has_nan = numerics.row_amax_and_nan(values, self._buffers.scratch)
        _check_finite(name, amax)
        if has_nan:
            self.found.with_nan.add(name)
        scale_inv = numerics.rounded_up(numerics.scale_inv(amax, element), encode.numbers)
        self._put(encode.weights[name].weight, row, scale_inv)
        return Encoding(element, scale_inv, (1, values.shape[1]))

    def put_values(self, name: str, row: int, values: Tensor) -> None:
        """Write rows as values, rounded to the target's dtype. Raises PrecisionError for a number beyond it, unless it
        is the source's largest: masks have that in the place of infinity."""
        spec, written = self._specs[name], values
        dtype = spec.dtype
        if isinstance(spec.packing, CodesInRows):
            self._put(name, row, self._in_rows(name, spec.packing, values))
            return
        if values.dtype != dtype.torch:
            written = self._buffers.to_write(dtype, *values.shape).copy_(values)
        if not numerics.are_finite(written):
            if numerics.has_nan(values):
                self.found.with_nan.add(name)
            too_large = written.isinf() & (values.abs() < torch.finfo(values.dtype).max)
            if self._refuses_infinity and bool(too_large.any()):
                what = f"`{name}` holds a number that is too large for {dtype} and would become infinite"
                raise PrecisionError(what, do=_IN_BF16 if dtype == DType.float16 else BROKEN_WEIGHTS)
        self._put(name, row, written)

    def _in_rows(self, name: str, packing: CodesInRows, values: Tensor) -> Tensor:
        """Rows as llama.cpp's blocks or MLX's groups, which have no number for NaN."""
        if numerics.has_nan(values):
            raise PrecisionError(f"`{name}` holds a NaN, for which {packing.name} has no code", do=BROKEN_WEIGHTS)
        largest = float(numerics.amax(values))
        if self._refuses_infinity and largest > packing.largest:
            what = f"`{name}` holds {largest:.3g}, beyond {packing.largest:.3g}, the largest number in {packing.name}"
            in_bf16 = largest <= torch.finfo(torch.bfloat16).max
            raise PrecisionError(what, do=_IN_BF16 if in_bf16 else BROKEN_WEIGHTS)
        made = self._buffers.to_write(DType.uint8, len(values), packing.row_bytes(values.shape[1]))
        for row, rows in in_pieces(0, len(values), values.shape[1], numerics.PIECE):
            made[row : row + rows] = packing.encode(values[row : row + rows])
        return made

    def put_encoding(self, weight: str, scales: Scales, encoding: Encoding) -> None:
        """Write all that a weight's encoding consists of."""
        self._put_grid(scales, encoding)
        self._put_further(weight, scales, encoding)

    def _put_grid(self, scales: Scales, encoding: Encoding, row: int = 0) -> None:
        """Write rows of a grid of scales from one on, given in FP32 or as they are stored (exponents as bytes)."""
        spec = self._specs[scales.weight]
        stored = encoding.scale_inv.to(scale_dtype(spec.dtype).torch).contiguous()
        self._put(scales.weight, row, stored.view(spec.dtype.torch).reshape(-1, spec.columns))

    def _put_further(self, weight: str, scales: Scales, encoding: Encoding) -> None:
        """Write what packed codes have besides their scales: zero points, a global scale, and the weight's shape."""
        if scales.zero_points and encoding.zeros is not None:
            self._put(scales.zero_points, 0, zero_points.packed(encoding.zeros, encoding.element.bits))
        if scales.global_scale and encoding.global_scale:
            self._put(scales.global_scale, 0, encoding.global_scale.value.reshape(1, 1))
        if scales.shape:
            dtype = self._specs[scales.shape].dtype.torch
            self._put(scales.shape, 0, torch.tensor(self._specs[weight].shape, dtype=dtype))

    def put_known(self, encode: Encode) -> None:
        """Write the scales that do not depend on weights: of inputs, and of a KV cache."""
        for name, value in encode.known.items():
            self._put(name, 0, torch.tensor([[value]]).to(self._specs[name].dtype.torch))


def _check_finite(name: str, amax: Tensor) -> None:
    """Raise PrecisionError for an infinite amax, as no scale brings an infinite weight to a number."""
    if bool(numerics.amax(amax).isinf()):
        raise PrecisionError(f"`{name}` holds an infinite weight, which no scale can hold", do=BROKEN_WEIGHTS)
