"""A GEMM in FP8 or NVFP4 in plain PyTorch, forward and backward, with the casts of each of TE's recipes.

It multiplies code values, accumulates in FP32, multiplies by the scale_inv of both sides, adds the bias and rounds
once. Code values are exact in FP32, so an FP32 matrix product stands in for the tensor cores. Both operands have the
dimension that is summed over last, as on Hopper (cublaslt_gemm.cu, CanonicalizeGemmInput):

    y     = rows(X) @ rows(W).T + bias          X: input [tokens, in]         sums over in
    dgrad = rows(G) @ columns(W).T              W: weight [out, in]           sums over out
    wgrad = columns(G) @ columns(X).T           G: grad_output [tokens, out]  sums over tokens

With one scale for a tensor, `columns` is `rows` transposed; with a scale for each block it has its own codes
(`codes.block_scaling`, `codes.nvfp4_scaling`).

Under delayed scaling a cast uses the scale from earlier steps and records the tensor's amax in row 0 of the history;
`fp8.delayed_scaling.update_delayed` computes the next scales from the history. TE also has the roles `output` and
`grad_input`, which no GEMM here uses; their state is only kept. Other scalings have no state.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from precisionctl.codes import block_scaling, numerics, nvfp4_scaling
from precisionctl.codes.elements import FP8
from precisionctl.codes.group_scales import NVFP4_GROUP, NVFP4_LARGEST
from precisionctl.codes.numerics import BLOCK, MX_BLOCK
from precisionctl.dtypes import DType
from precisionctl.errors import PrecisionError
from precisionctl.fp8.state import IN_USE, Fp8State, Role, RoleState
from precisionctl.precision import Precision
from precisionctl.trainer.backends.scaling_buffers import Slot


class Operand(NamedTuple):
    """One side of a GEMM: FP8 codes `[rows, K]`, where the product sums over K, and their FP32 scale_inv: `[]` for all,
    `[rows, 1]` for each row, or `[rows, groups]` for equal groups of elements in a row, the last of which may be padded
    with zeros. Those of NVFP4 are E4M3 codes of E2M1's numbers."""

    codes: Tensor
    scale_inv: Tensor

    @property
    def in_groups(self) -> bool:
        """Whether scale_inv varies along K, so that it must be multiplied inside the sum."""
        return self.scale_inv.dim() == 2 and self.scale_inv.shape[1] != 1

    def transposed(self) -> "Operand":
        """The transposed operand, for codes with one scale_inv."""
        return Operand(self.codes.t(), self.scale_inv)

    def summands(self) -> Tensor:
        """The factors inside the sum, FP32 `[rows, K]`: the numbers of the codes, times scale_inv if it varies along
        K."""
        codes = self.codes if self.codes.dtype == torch.float32 else numerics.code_values(self.codes)
        if not self.in_groups:
            return codes
        rows, groups = self.scale_inv.shape
        size = codes.shape[1] // max(groups, 1)  # an expert without tokens has no groups along them
        return (codes.reshape(rows, groups, size) * self.scale_inv[..., None]).flatten(1)

    def multiplier(self) -> Tensor:
        """The factor outside the sum, FP32 `[]` or `[rows, 1]`."""
        return self.scale_inv.new_ones(()) if self.in_groups else self.scale_inv

    def gemm(self, left: "Operand") -> Tensor:
        """`left @ self.T`, FP32 `[rows of left, rows of self]`."""
        return (left.summands() @ self.summands().t()).mul_(left.multiplier() * self.multiplier().t())


class NativeOperand(Operand):
    """The right side of a GEMM by PyTorch's FP8 kernel, which takes codes directly."""

    def gemm(self, left: Operand) -> Tensor:
        one = self.scale_inv.new_ones(())
        sums = torch._scaled_mm(left.codes, self.codes.t(), one, one, out_dtype=torch.float32)
        return sums.mul_(left.multiplier() * self.multiplier().t())


class NativeBlocks(Operand):
    """The right side of a GEMM with scales for squares of BLOCK, `scale_inv` FP32 `[rows / BLOCK, columns / BLOCK]`,
    and a left side in groups of BLOCK. PyTorch's kernel computes it, by cuBLASLt on Hopper, which rounds to BF16. Rows
    and columns must be multiples of 16.

    The kernel wants scales stored with rows (of the left side) and blocks of rows (of this) contiguous, the number of
    squares along a row padded to a multiple of four, and the number of tokens to a multiple of 16 (PyTorch's
    ScaledBlas.cpp, _scaled_block1x128_block128x128).
    """

    def gemm(self, left: Operand) -> Tensor:
        rows, groups = left.scale_inv.shape
        filled = F.pad(left.codes.view(torch.uint8), (0, 0, 0, -rows % 16)).view(left.codes.dtype)
        by_group = F.pad(left.scale_inv.t(), (0, -rows % 16), value=1.0).contiguous()
        by_square = F.pad(self.scale_inv, (0, -groups % 4), value=1.0)
        product = F.scaled_mm(
            filled,
            self.codes.t(),
            by_group.t(),
            F.ScalingType.BlockWise1x128,
            by_square.t(),
            F.ScalingType.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )
        return product[:rows].float()


class Quantized(NamedTuple):
    """A tensor as an operand of GEMMs that sum over its columns (`rows`), and of those in the backward that sum over
    its rows (`columns`; None if there is no backward)."""

    rows: Operand
    columns: Operand | None = None


class Quantizer(Protocol):
    """How one role of a GEMM is cast to FP8."""

    def quantize(self, values: Tensor) -> Quantized:
        """The codes and scales of values `[rows, columns]`."""
        ...


@dataclass(frozen=True)
class DelayedQuantizer:
    """Casts with the scale in its slot and records the amax for the next scale. Values that are already codes are used
    as they are."""

    slot: Slot

    def quantize(self, values: Tensor) -> Quantized:
        if values.dtype == self.slot.buffers.dtype:
            return _with_one_scale(values, self.slot.scale)
        self.slot.record(numerics.amax(values))
        return _with_one_scale(numerics.encode(values, self.slot.scale, self.slot.buffers.dtype), self.slot.scale)


@dataclass(frozen=True)
class CurrentQuantizer:
    """Casts with the scale from the tensor's own amax."""

    dtype: torch.dtype

    def quantize(self, values: Tensor) -> Quantized:
        scale = numerics.current_scale(numerics.amax(values), self.dtype)
        return _with_one_scale(numerics.encode(values, scale, self.dtype), scale)


def _with_one_scale(codes: Tensor, scale: Tensor) -> Quantized:
    rows = Operand(codes, scale.reciprocal())
    return Quantized(rows, rows.transposed())


BlockCast = Callable[[Tensor, tuple[int, int]], tuple[Tensor, Tensor]]
"""The cast of values in blocks of such a size: codes, padded to whole blocks, and the FP32 scale_inv of each block."""


@dataclass(frozen=True)
class GroupQuantizer:
    """Casts groups of `size` elements: along the rows and, from the same values, along the columns."""

    size: int
    cast: BlockCast

    def quantize(self, values: Tensor) -> Quantized:
        along_rows, along_columns = (self.cast(each, (1, self.size)) for each in (values, values.t()))
        return Quantized(Operand(*along_rows), Operand(*along_columns))


@dataclass(frozen=True)
class SquareQuantizer:
    """Casts squares of `size` x `size` elements."""

    size: int
    cast: BlockCast

    def quantize(self, values: Tensor) -> Quantized:
        rows, columns = values.shape
        codes, grid = self.cast(values, (self.size, self.size))
        by_row, by_column = (scale_inv.repeat_interleave(self.size, 0) for scale_inv in (grid, grid.t()))
        return Quantized(Operand(codes[:rows], by_row[:rows]), Operand(codes.t()[:columns], by_column[:columns]))


Seeded = Callable[[], torch.Generator]
"""A generator of random numbers that depend on the pass and the GEMM alone."""


@dataclass(frozen=True)
class HadamardQuantizer:
    """Casts to NVFP4 along the rows and, for the gradient of the weight, the transformed values along the columns. With
    `generator` numbers are rounded at random."""

    generator: Seeded | None = None

    def quantize(self, values: Tensor) -> Quantized:
        cast = partial(_nvfp4, generator=self.generator() if self.generator else None)
        along_rows, along_columns = (
            cast(each, (1, NVFP4_GROUP)) for each in (values, nvfp4_scaling.transformed(values.t()))
        )
        return Quantized(Operand(*along_rows), Operand(*along_columns))


def _nvfp4(values: Tensor, block: tuple[int, int], generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """The BlockCast to NVFP4. One FP32 number stands in for both scales of a block: its product with the sums of a
    block differs from theirs by less than the order of summation does."""
    codes, scale_inv, amax = nvfp4_scaling.quantize(values, block, generator)
    return codes, scale_inv.float() * (amax / NVFP4_LARGEST)


Quantizers = Mapping[Role, Quantizer]
"""The quantizers of a GEMM by role; empty if it stays in BF16."""


def nvfp4_quantizers(generator: Seeded) -> Quantizers:
    """The quantizers for NVFP4: gradients are rounded with random numbers of `generator` (TE's NVFP4BlockScaling,
    common/recipe/__init__.py)."""
    return {
        "input": HadamardQuantizer(),
        "weight": SquareQuantizer(NVFP4_GROUP, _nvfp4),
        "grad_output": HadamardQuantizer(generator),
    }


def stateless_quantizers(precision: Precision, dtype: torch.dtype) -> Quantizers:
    """The quantizers for current, block or MXFP8 scaling, of tensors of `dtype`."""
    quantizers: dict[Role, Quantizer] = {}
    for role in IN_USE:
        codes = precision.dtype(role)
        if precision.scaling == "current":
            quantizers[role] = CurrentQuantizer(codes)
        elif precision.scaling == "mxfp8":
            scale_of = partial(numerics.mx_scale, dtype=codes)
            quantizers[role] = GroupQuantizer(MX_BLOCK, partial(block_scaling.quantize, scale_of=scale_of, dtype=codes))
        else:
            scale_of = partial(
                numerics.block_scale,
                dtype=codes,
                power_of_2=not precision.block.use_f32_scales,
                largest=torch.finfo(dtype).max,
            )
            in_blocks = SquareQuantizer if role == "weight" else GroupQuantizer
            quantizers[role] = in_blocks(BLOCK, partial(block_scaling.quantize, scale_of=scale_of, dtype=codes))
    return quantizers


class Fp8Matmul(torch.autograd.Function):
    """`linear(values, weight, bias)` in FP8, forward and backward.

    `values` are `[tokens, in]` in FP32 or `dtype`, `weight` `[out, in]` with its cast `w`, `bias` `[out]` or None. The
    result is `[tokens, out]` in `dtype`, the activations' dtype, to which gradients are rounded, too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        w: Quantized,
        quantizers: Quantizers,
        dtype: torch.dtype,
    ) -> Tensor:
        x = quantizers["input"].quantize(values)
        ctx.save_for_backward(*(x.columns or ()), *(w.columns or ()))
        ctx.grad_quantizer, ctx.dtype = quantizers["grad_output"], dtype
        product = w.rows.gemm(x.rows)
        if bias is not None:
            product += bias.bfloat16()  # as TE, also for FP32 activations: cuBLAS has no FP8 GEMM with an FP32 bias
        return product.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x_codes, x_scale_inv, w_codes, w_scale_inv = ctx.saved_tensors
        g = ctx.grad_quantizer.quantize(grad_output)
        dgrad = wgrad = bias_grad = None
        if ctx.needs_input_grad[0]:
            dgrad = Operand(w_codes, w_scale_inv).gemm(g.rows).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            wgrad = Operand(x_codes, x_scale_inv).gemm(g.columns).to(ctx.dtype)
        if ctx.needs_input_grad[2]:
            bias_grad = grad_output.sum(0, dtype=torch.float32).to(ctx.dtype)
        return dgrad, wgrad, bias_grad, None, None, None


Casts = dict[Tensor, Quantized]
"""Casts of weights, to be reused in passes between which the weights do not change."""


def fp8_gemm(
    values: Tensor, weight: Tensor, bias: Tensor | None, quantizers: Quantizers, casts: Casts | None
) -> Tensor:
    """`Fp8Matmul` of values `[..., in]`; returns `[..., out]` in the weight's dtype, or in the values' if the weight is
    codes. The weight is cast unless its cast is in `casts`, to which it is added."""
    dtype = values.dtype if DType.of(weight.dtype) in FP8 else weight.dtype
    rows, w = values.flatten(0, -2), casts.get(weight) if casts else None
    if w is None:
        with torch.no_grad():
            w = quantizers["weight"].quantize(weight)
    if casts is not None:
        casts[weight] = w
    out: Tensor = Fp8Matmul.apply(rows, weight, bias, w, quantizers, dtype)  # type: ignore[no-untyped-call]
    return out.view(*values.shape[:-1], len(weight))


def delayed(quantizers: Quantizers) -> dict[Role, DelayedQuantizer]:
    """The quantizers that keep state."""
    return {role: q for role, q in quantizers.items() if isinstance(q, DelayedQuantizer)}


def state_of(quantizers: Quantizers) -> Fp8State | None:
    """The state of a GEMM's quantizers, copied to the CPU; None if they keep none."""
    stateful = delayed(quantizers)
    return Fp8State({role: q.slot.state for role, q in stateful.items()}) if stateful else None


def views_of(quantizers: Quantizers) -> Iterator[tuple[Role, RoleState]]:
    """Views of the state of the roles in use, on the device, valid until the next pass."""
    return ((role, q.slot.view) for role, q in delayed(quantizers).items() if role in IN_USE)


def set_state(name: str, quantizers: Quantizers, state: Fp8State) -> None:
    """Set the state of the quantizers of the GEMM `name`. Raises PrecisionError if they keep none."""
    stateful = delayed(quantizers)
    if not stateful:
        raise PrecisionError("this GEMM keeps no FP8 state", where=name)
    for role, quantizer in stateful.items():
        quantizer.slot.set_state(state.roles[role])
