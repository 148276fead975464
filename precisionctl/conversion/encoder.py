"""Encode weights: a first pass over a job's values finds the scales, a second one makes the codes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import isinf
from typing import TYPE_CHECKING

from precisionctl.checkpoints.chunks import Chunked, in_pieces, read_rows
from precisionctl.codes import nibbles, numerics, zero_points
from precisionctl.codes.blocks import BlockScales, share, share_global
from precisionctl.codes.elements import CodesInRows, Element
from precisionctl.codes.encoding import Encoding, scale_dtype
from precisionctl.codes.four_bit_loss import most_zeros
from precisionctl.codes.statistics import UNDERFLOW
from precisionctl.conversion.buffers import Buffers
from precisionctl.conversion.outcome import Outcome
from precisionctl.dtypes import DType
from precisionctl.errors import BROKEN_WEIGHTS, PrecisionError
from precisionctl.param import TensorSpec
from precisionctl.planning.plan import Job, JobCodes, ScaleGroup
from precisionctl.quant_methods.scales import Scales
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

_IN_BF16 = "BF16 has a number for it: choose that."

ValuePiece = tuple[str, int, "Tensor"]
"""Name and first row of the tensor to write, and values `[rows, columns]` in a buffer that the next piece reuses."""

Put = Callable[[str, int, "Tensor"], None]
"""Writes rows of a tensor: called with its name, the first row's number, and the rows in the target's dtype."""


class Encoder:
    """Encodes jobs of a plan into tensors of these `specs`, which are written by `put`.

    `former` are the encodings that values had before, by the target's names: blocks whose values have not changed keep
    their scales. `values` gives what a job would write as values, piece by piece, anew each time it is called.
    `former_codes` has the codes that weights had, by the same names, if they are still stored somewhere.
    `refuses_infinity`: a number that rounding makes infinite is an error.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        former: Mapping[str, Encoding],
        buffers: Buffers,
        put: Put,
        values: Callable[[Job], Iterable[ValuePiece]],
        former_codes: Chunked | None = None,
        refuses_infinity: bool = True,
    ) -> None:
        self.specs, self.buffers, self.put, self.former_codes = specs, buffers, put, former_codes
        self._former, self._values, self._refuses_infinity = former, values, refuses_infinity
        self._group: tuple[ScaleGroup, dict[str, BlockScales]] | None = None
        """The last group and its scales: its jobs are mostly done one after the other."""
        self.outcome = Outcome()
        """Of the job that is being done: the Worker puts a new one here for each."""

    def encode(self, job: Job) -> None:
        """Write the codes and scales of a job. If each row has its own scale and none from before, one pass over its
        values is enough.

        Raises PrecisionError for an infinite weight, and for one with whose scale no engine computes.
        """
        codes = job.codes
        assert codes is not None
        seen = self._first_pass(job, codes)
        weights = {
            name: _WeightCodes(self, name, scales, codes.scale_rounding, seen.get(name))
            for name, scales in codes.weights.items()
        }
        for name, row, values in self._values(job):
            if name in weights:
                weights[name].write(row, values)
            else:
                self.put_values(name, row, values)
        for weight in weights.values():
            weight.report_to(self.outcome)
        self.put_known(codes)

    def _first_pass(self, job: Job, codes: JobCodes) -> dict[str, BlockScales]:
        """Find the scales of each weight, except those whose scales are found row by row in the second pass."""
        if (group := codes.group) is None:
            return self._seen(
                [job], {name: each for name, each in codes.weights.items() if not self._is_by_row(name, each)}
            )
        if self._group is None or self._group[0] is not group:
            seen = self._seen(group.jobs, group.weights)
            if any(each.divides is not None for each in seen.values()):
                share_global([*seen.values()], always=group.always)
            else:
                share([*seen.values()])
            self._group = group, seen
        return self._group[1]

    def _seen(self, jobs: Sequence[Job], weights: Mapping[str, Scales]) -> dict[str, BlockScales]:
        """What all values of these weights, which these jobs write, say of their scales."""
        seen = dict[str, BlockScales]()
        for name, scales in weights.items():
            spec = self.specs[name]
            seen[name] = BlockScales(
                spec.rows,
                spec.columns,
                scales.block,
                spec.element,
                former=self._former.get(name),
                divides=scales.global_divides,
                zero_points=scales.zero_points is not None,
            )
        for name, row, values in (piece for job in jobs for piece in self._values(job)) if seen else ():
            if name in seen:
                seen[name].see(values, row, self.buffers.scratch)
        for name, blocks in seen.items():
            _check_has_scale(name, blocks.amax.masked_fill(blocks.fits, 0), blocks.element)
            if blocks.has_nan:
                if not blocks.element.is_fp8:
                    what = f"`{name}` holds a NaN, for which {blocks.element.name} has no code"
                    raise PrecisionError(what, do=BROKEN_WEIGHTS)
                self.outcome.with_nan.add(name)
        return seen

    def _is_by_row(self, name: str, scales: Scales) -> bool:
        """Whether each row has a scale of its own, FP32 and none from before."""
        spec, fp32 = self.specs[name], self.specs[scales.weight].dtype == DType.float32
        return scales.block == (1, spec.columns) and fp32 and spec.packing is None and name not in self._former

    def put_values(self, name: str, row: int, values: Tensor) -> None:
        """Write rows as values, rounded to the target's dtype. Raises PrecisionError for a number beyond it, unless it
        is the source's largest: masks have that in the place of infinity."""
        spec, written = self.specs[name], values
        dtype = spec.dtype
        if isinstance(spec.packing, CodesInRows):
            self.put(name, row, self._in_rows(name, spec.packing, values))
            return
        if values.dtype != dtype.torch:
            written = self.buffers.to_write(dtype, *values.shape).copy_(values)
        if not numerics.are_finite(written):
            if numerics.has_nan(values):
                self.outcome.with_nan.add(name)
                numerics.restore_signs_of_nan(written, values)
            too_large = written.isinf() & (values.abs() < torch.finfo(values.dtype).max)
            if self._refuses_infinity and bool(too_large.any()):
                what = f"`{name}` holds a number that is too large for {dtype} and would become infinite"
                raise PrecisionError(what, do=_IN_BF16 if dtype == DType.float16 else BROKEN_WEIGHTS)
        self.put(name, row, written)

    def _in_rows(self, name: str, packing: CodesInRows, values: Tensor) -> Tensor:
        """Rows as llama.cpp's blocks or MLX's groups, which have no number for NaN."""
        if numerics.has_nan(values):
            raise PrecisionError(f"`{name}` holds a NaN, for which {packing.name} has no code", do=BROKEN_WEIGHTS)
        largest = float(numerics.amax(values))
        if self._refuses_infinity and largest > packing.largest:
            limit = f"{packing.largest:.3g}, the largest number that is written in {packing.name}"
            what = f"`{name}` holds {largest:.3g}, beyond {limit}"
            in_bf16 = largest <= torch.finfo(torch.bfloat16).max
            raise PrecisionError(what, do=_IN_BF16 if in_bf16 else BROKEN_WEIGHTS)
        made = self.buffers.to_write(DType.uint8, len(values), packing.row_bytes(values.shape[1]))
        for row, rows in in_pieces(0, len(values), values.shape[1], numerics.PIECE):
            made[row : row + rows] = packing.encode(values[row : row + rows])
        return made

    def put_grid(self, scales: Scales, encoding: Encoding, row: int = 0) -> None:
        """Write rows of a grid of scales from one on, given in FP32 or as they are stored (exponents as bytes)."""
        spec = self.specs[scales.weight]
        stored = encoding.scale_inv.to(scale_dtype(spec.dtype).torch).contiguous()
        self.put(scales.weight, row, stored.view(spec.dtype.torch).reshape(-1, spec.columns))

    def put_further(self, weight: str, scales: Scales, encoding: Encoding) -> None:
        """Write what packed codes have besides their scales: zero points, a global scale, and the weight's shape."""
        if scales.zero_points and encoding.zeros is not None:
            self.put(scales.zero_points, 0, zero_points.packed(encoding.zeros, encoding.element.bits))
        if scales.global_scale and encoding.global_scale:
            self.put(scales.global_scale, 0, encoding.global_scale.value.reshape(1, 1))
        if scales.shape:
            dtype = self.specs[scales.shape].dtype.torch
            self.put(scales.shape, 0, torch.tensor(self.specs[weight].shape, dtype=dtype))

    def put_known(self, codes: JobCodes) -> None:
        """Write the scales that do not depend on weights: of inputs, and of a KV cache."""
        for name, value in codes.known.items():
            self.put(name, 0, torch.tensor([[value]]).to(self.specs[name].dtype.torch))


class _WeightCodes:
    """A weight of a job in the second pass: encodes its rows, and counts what becomes of them. `seen` is what the first
    pass found; None if each row has a scale of its own, which is found here."""

    def __init__(
        self, encoder: Encoder, name: str, scales: Scales, rounding: numerics.ScaleRounding, seen: BlockScales | None
    ) -> None:
        self._encoder, self._name, self._scales, self._rounding, self._seen = encoder, name, scales, rounding, seen
        self._whole: Encoding | None = None
        """The encoding of the whole tensor after the first pass. The parts that are final by now are written."""
        if seen is not None:
            self._whole = seen.settle(scale_dtype(encoder.specs[scales.weight].dtype).torch, rounding)
            if not seen.searches:
                encoder.put_grid(scales, self._whole)
            encoder.put_further(name, scales, self._whole)
        self._searches = seen is not None and seen.searches
        has_changed = seen is not None and seen.former is not None and not bool(seen.fits.all())
        self._changed = 0 if has_changed else None
        self._elements, self._zeroed = 0, 0  # those that were looked at, and those that became zero

    @cached_property
    def _most_zeros(self) -> float | None:
        """The share of elements above which it is told that they became zero; None if they are not counted. In four
        bits many Gaussian weights become zero too: how many is known of the groups of schemes, without zero points."""
        spec = self._encoder.specs[self._name]
        if spec.element.is_fp8:
            return UNDERFLOW
        return most_zeros(spec.element, self._scales.block, zero_points=self._scales.zero_points is not None)

    def write(self, row: int, values: Tensor) -> None:
        """Write the codes of rows, and those of their scales that are found here."""
        encoder, name = self._encoder, self._name
        spec = encoder.specs[name]
        first = 0  # the number that the first of these rows has in `encoding`
        if self._seen is None or self._whole is None:  # each row has a scale of its own, from its own amax
            amax, has_nan = numerics.row_amax_and_nan(values, encoder.buffers.scratch)
            _check_has_scale(name, amax, spec.element)
            if has_nan:
                encoder.outcome.with_nan.add(name)
            new = numerics.scale_inv(amax, spec.element).clamp(min=numerics.SMALLEST_SCALE)
            scale_inv = numerics.rounded_up(new, self._rounding)
            encoder.put(self._scales.weight, row, scale_inv)
            encoding = Encoding(spec.element, scale_inv, (1, values.shape[1]))
        elif self._searches:
            encoding = self._seen.searched(values, row, self._whole, encoder.buffers.scratch)
            encoder.put_grid(self._scales, encoding, row)
        else:
            encoding, first = self._whole, row

        codes = encoder.buffers.to_write(encoding.element.dtype, len(values), spec.width)
        encoding.encode_rows(values, first, codes, encoder.buffers.scratch)
        if self._changed is not None:
            self._changed += self._differing(row, codes, values, encoding.of_rows(first, len(values)))
        if self._most_zeros is not None:
            # in one row of 16: to count all would add a tenth to the time of a cast, and if an outlier spoils a scale,
            # most rows show it
            some, their_codes = values[::16], codes[::16]
            self._elements += some.numel()
            if spec.element.is_fp8:
                self._zeroed += numerics.underflows(some, their_codes)
            else:
                self._zeroed += nibbles.underflows(some, spec.element, their_codes)
        encoder.put(name, row, codes)

    def _differing(self, row: int, codes: Tensor, values: Tensor, now: Encoding) -> int:
        """How many codes differ from the codes before. If those are no longer stored, from the codes that the former
        scales would give."""
        spec, former = self._encoder.specs[self._name], self._encoder.former_codes
        stored = former.specs.get(self._name) if former else None
        if former is None or stored is None or stored != replace(spec, parallel=stored.parallel):
            assert self._seen is not None
            return self._seen.changed(values, codes, row, now)
        return stored.element.differing(read_rows(former, self._name, row, len(codes)), codes)

    def report_to(self, outcome: Outcome) -> None:
        """Add to the job's outcome what all rows together show."""
        zeroed = self._zeroed / max(1, self._elements)
        if self._most_zeros is not None and zeroed > self._most_zeros:
            outcome.zeroed[self._name] = zeroed
        if self._changed is not None:
            outcome.changed[self._name] = self._changed
        if self._seen and not self._seen.exact:
            outcome.rounded.add(self._name)


def _check_has_scale(name: str, amax: Tensor, element: Element) -> None:
    """Raise PrecisionError for the amax of a weight that needs a new scale, if no scale brings it to a number, or only
    one with which no engine computes."""
    largest = float(numerics.amax(amax))
    if isinf(largest):
        raise PrecisionError(f"`{name}` holds an infinite weight, which no scale can hold", do=BROKEN_WEIGHTS)
    if largest > numerics.LARGEST_SCALE * element.of_amax:
        what = f"`{name}` holds {largest:.3g}, and no engine computes with the scale that {element.name} needs for it"
        module = name.removesuffix(".weight")
        raise PrecisionError(what, do=f"Is the checkpoint broken there? If not, keep it in BF16: --exclude '{module}'.")
