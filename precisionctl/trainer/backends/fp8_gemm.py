"""An FP8 GEMM in plain PyTorch, forward and backward, with the casts of each of Transformer Engine's recipes.

It multiplies code values, accumulates in FP32, multiplies by what decodes them, adds the bias and rounds once. Code
values are exact in FP32, so FP32 matrix products stand in for the tensor cores. Both operands of a product lie along
what it sums over, as on Hopper (cublaslt_gemm.cu, CanonicalizeGemmInput):

    y     = rows(X) @ rows(W).T + bias          X: input [tokens, in]         sums over in
    dgrad = rows(G) @ columns(W).T              W: weight [out, in]           sums over out
    wgrad = columns(G) @ columns(X).T           G: grad_output [tokens, out]  sums over tokens

Where a scale is for all of a tensor, `columns` are `rows` transposed; where it is for a block, they are codes of their
own (`fp8.block_scaling`).

Under delayed scaling a cast uses the scale that earlier steps gave and records its tensor's amax in row 0 of
the history; `fp8.numerics.update_delayed` turns those rows into the next scales. TE also has roles `output`
and `grad_input`, which no GEMM here uses; their state is only kept. The other recipes keep no state.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from precisionctl.errors import PrecisionError
from precisionctl.fp8 import block_scaling, numerics
from precisionctl.fp8.numerics import BLOCK, MX_BLOCK
from precisionctl.fp8.state import IN_USE, Fp8State, Role, RoleState
from precisionctl.precision import Precision
from precisionctl.trainer.backends.scaling_buffers import Slot


class Operand(NamedTuple):
    """FP8 codes `[rows, summed over]`, and the FP32 multipliers that decode them: `[]` for all, `[rows, 1]` for a row,
    or `[rows, groups]` for equal groups of neighbours in a row, of which zeros may fill the last."""

    codes: Tensor
    scale_inv: Tensor

    @property
    def in_groups(self) -> bool:
        """Whether multipliers belong inside the sum."""
        return self.scale_inv.dim() == 2 and self.scale_inv.shape[1] != 1

    def transposed(self) -> "Operand":
        """The transposed operand; its codes have one multiplier."""
        return Operand(self.codes.t(), self.scale_inv)

    def inside(self) -> Tensor:
        """What is summed over, FP32."""
        codes = self.codes if self.codes.dtype == torch.float32 else numerics.code_values(self.codes)
        if not self.in_groups:
            return codes
        rows, groups = self.scale_inv.shape
        size = codes.shape[1] // max(groups, 1)  # an expert without tokens has no groups along them
        return (codes.reshape(rows, groups, size) * self.scale_inv[..., None]).flatten(1)

    def outside(self) -> Tensor:
        """What sums are multiplied by, FP32 `[]` or `[rows, 1]`."""
        return self.scale_inv.new_ones(()) if self.in_groups else self.scale_inv

    def under(self, left: "Operand") -> Tensor:
        """The product of `left` and this transposed, FP32 `[rows of left, rows of this]`."""
        return (left.inside() @ self.inside().t()).mul_(left.outside() * self.outside().t())


class NativeOperand(Operand):
    """One whose products are left to PyTorch's own FP8 GEMM, as the right side; it takes the codes as they are."""

    def under(self, left: Operand) -> Tensor:
        one = self.scale_inv.new_ones(())
        sums = torch._scaled_mm(left.codes, self.codes.t(), one, one, out_dtype=torch.float32)
        return sums.mul_(left.outside() * self.outside().t())


class NativeBlocks(Operand):
    """One of squares of BLOCK, `scale_inv` FP32 `[rows / BLOCK, columns / BLOCK]`, under a left side in groups of
    BLOCK: a product of PyTorch's own too, by cuBLASLt on Hopper, which rounds it to BF16. Rows and columns are
    multiples of 16, as FP8 GEMMs want it.

    It takes scales with rows and blocks of rows as neighbours; those of a column of squares are filled up to a
    multiple of four, tokens to one of 16 (PyTorch's ScaledBlas.cpp, _scaled_block1x128_block128x128).
    """

    def under(self, left: Operand) -> Tensor:
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
    """What a tensor is to products that sum over its columns, and to those that sum over its rows, which are the
    backward's: None where there is none."""

    rows: Operand
    columns: Operand | None = None


class Quantizer(Protocol):
    """How one role of a GEMM is cast to FP8."""

    def quantize(self, values: Tensor) -> Quantized:
        """The codes and scales of values `[rows, columns]`."""
        ...


@dataclass(frozen=True)
class DelayedQuantizer:
    """Casts with the scale in its slot, and records the amax for the next one. Codes are taken for what such a cast has
    given before."""

    slot: Slot

    def quantize(self, values: Tensor) -> Quantized:
        if values.dtype == self.slot.buffers.dtype:
            return _under(values, self.slot.scale)
        self.slot.record(numerics.amax(values))
        return _under(numerics.encode(values, self.slot.scale, self.slot.buffers.dtype), self.slot.scale)


@dataclass(frozen=True)
class CurrentQuantizer:
    """Casts with the scale that the tensor's own amax gives."""

    dtype: torch.dtype

    def quantize(self, values: Tensor) -> Quantized:
        scale = numerics.current_scale(numerics.amax(values), self.dtype)
        return _under(numerics.encode(values, scale, self.dtype), scale)


def _under(codes: Tensor, scale: Tensor) -> Quantized:
    rows = Operand(codes, scale.reciprocal())
    return Quantized(rows, rows.transposed())


@dataclass(frozen=True)
class GroupQuantizer:
    """Casts `size` neighbours under the scale of their amax, by `scale_of`: along the rows, and once more, from the
    same values, along the columns."""

    dtype: torch.dtype
    size: int
    scale_of: block_scaling.ScaleOf

    def quantize(self, values: Tensor) -> Quantized:
        return Quantized(self._along_rows(values), self._along_rows(values.t()))

    def _along_rows(self, values: Tensor) -> Operand:
        return Operand(*block_scaling.quantize(values, (1, self.size), self.scale_of, self.dtype))


@dataclass(frozen=True)
class SquareQuantizer:
    """Casts squares of `size` x `size` under the scale of their amax, by `scale_of`."""

    dtype: torch.dtype
    size: int
    scale_of: block_scaling.ScaleOf

    def quantize(self, values: Tensor) -> Quantized:
        rows, columns = values.shape
        codes, grid = block_scaling.quantize(values, (self.size, self.size), self.scale_of, self.dtype)
        by_row, by_column = (scale_inv.repeat_interleave(self.size, 0) for scale_inv in (grid, grid.t()))
        return Quantized(Operand(codes[:rows], by_row[:rows]), Operand(codes.t()[:columns], by_column[:columns]))


Quantizers = Mapping[Role, Quantizer]
"""How a GEMM's tensors are cast, by role; empty where it stays in BF16."""


def stateless_quantizers(precision: Precision, dtype: torch.dtype) -> Quantizers:
    """The quantizers of a recipe whose scales come from the tensors themselves, for tensors of `dtype`."""
    return {role: _stateless(precision, role, dtype) for role in IN_USE}


def _stateless(precision: Precision, role: Role, dtype: torch.dtype) -> Quantizer:
    codes = precision.dtype(role)
    if precision.scaling == "current":
        return CurrentQuantizer(codes)
    if precision.scaling == "mxfp8":
        return GroupQuantizer(codes, MX_BLOCK, partial(numerics.mx_scale, dtype=codes))
    scale_of = partial(
        numerics.block_scale,
        dtype=codes,
        power_of_2=not precision.block.use_f32_scales,
        largest=torch.finfo(dtype).max,
    )
    return SquareQuantizer(codes, BLOCK, scale_of) if role == "weight" else GroupQuantizer(codes, BLOCK, scale_of)


class Fp8Matmul(torch.autograd.Function):
    """`linear(values, weight, bias)` in FP8, forward and backward.

    values `[tokens, in]` in FP32 or `dtype`, weight `[out, in]`, cast as `w`, bias `[out]` or None; gives
    `[tokens, out]` in `dtype`, the activations' dtype, to which gradients are rounded as well.
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
        product = w.rows.under(x.rows)
        if bias is not None:
            product += bias.bfloat16()  # TE casts it for FP32 activations too: cuBLAS has no FP8 GEMM with an FP32 bias
        return product.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x_codes, x_scale_inv, w_codes, w_scale_inv = ctx.saved_tensors
        g = ctx.grad_quantizer.quantize(grad_output)
        dgrad = wgrad = bias_grad = None
        if ctx.needs_input_grad[0]:
            dgrad = Operand(w_codes, w_scale_inv).under(g.rows).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            wgrad = Operand(x_codes, x_scale_inv).under(g.columns).to(ctx.dtype)
        if ctx.needs_input_grad[2]:
            bias_grad = grad_output.sum(0, dtype=torch.float32).to(ctx.dtype)
        return dgrad, wgrad, bias_grad, None, None, None


Casts = dict[Tensor, Quantized]
"""Weights as they were cast, for passes in which they are the same."""


def fp8_gemm(
    values: Tensor, weight: Tensor, bias: Tensor | None, quantizers: Quantizers, casts: Casts | None = None
) -> Tensor:
    """`Fp8Matmul` of values `[..., in]`, in the weight's dtype, or their own where the weight is codes. The weight is
    cast unless it is among the `casts`, and joins them."""
    dtype = values.dtype if weight.dtype in numerics.FP8_MAX else weight.dtype
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
    """The state of those that keep state; None where none does."""
    stateful = delayed(quantizers)
    return Fp8State({role: q.slot.state for role, q in stateful.items()}) if stateful else None


def views_of(quantizers: Quantizers) -> Iterator[tuple[Role, RoleState]]:
    """What stands there now of the roles in use."""
    return ((role, q.slot.view) for role, q in delayed(quantizers).items() if role in IN_USE)


def set_state(name: str, quantizers: Quantizers, state: Fp8State) -> None:
    """Raises PrecisionError where the GEMM of this name keeps none."""
    stateful = delayed(quantizers)
    if not stateful:
        raise PrecisionError("this GEMM keeps no FP8 state", where=name)
    for role, quantizer in stateful.items():
        quantizer.slot.set_state(state.roles[role])
