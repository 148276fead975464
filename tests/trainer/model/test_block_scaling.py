"""128-block scaling and MXFP8 in the emulation against a slow reference, written from TE's kernels block after block:
transpose/quantize_transpose_vector_blockwise.cu and quantize_transpose_square_blockwise.cu with
recipe/recipe_common.cuh, and cast/mxfp8/quantize_mxfp8.cuh with util/ptx_arch_spec.cuh and util/ptx.cuh."""

import math
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from emulated_linears import assert_rounded_once, backend_of
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from soaking import first, in_soak
from torch import Tensor

from precisionctl.errors import PrecisionError
from precisionctl.fp8.state import IN_USE, Role
from precisionctl.precision import PRESETS, BlockScaling, Precision
from precisionctl.trainer.backends.base import Norm
from precisionctl.trainer.backends.fp8_gemm import Operand, Quantized, stateless_quantizers

FP32 = NDArray[np.float32]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = PRESETS["fp8-block"]
RECIPES: dict[str, Precision] = {
    "block": BLOCK,
    "block, FP32 scales": replace(BLOCK, block=BlockScaling(use_f32_scales=True)),
    "block, hybrid": replace(BLOCK, block=BlockScaling(fp8_format="HYBRID")),
    "mxfp8": PRESETS["mxfp8"],
    "mxfp8, hybrid": replace(PRESETS["mxfp8"], block=BlockScaling(fp8_format="HYBRID")),
}


def slow_cast(value: np.float32, dtype: torch.dtype) -> float:
    """cvt.rn.satfinite: the nearest code, of two the even one, from the bits of the format; NaN stays."""
    mantissa, bias, largest = (3, 7, 448.0) if dtype == E4M3 else (2, 15, 57344.0)
    if math.isnan(value):
        return math.nan
    magnitude = abs(float(value))
    exponent = max(math.frexp(magnitude)[1] - 1, 1 - bias) if 0 < magnitude < math.inf else 0
    step = 2.0 ** (exponent - mantissa)
    rounded = largest if magnitude == math.inf else min(round(magnitude / step) * step, largest)  # round() is to even
    return math.copysign(rounded, value)


def slow_scale(amax: np.float32, recipe: Precision, role: Role, dtype: torch.dtype) -> np.float32:
    largest = np.float32(448 if recipe.block.fp8_format == "E4M3" or role != "grad_output" else 57344)
    if recipe.scaling == "mxfp8":
        return slow_mx_scale(amax, largest)
    if amax == 0 or math.isinf(amax):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = largest / amax
    if math.isinf(scale):
        scale = np.float32(torch.finfo(dtype).max)
    if recipe.block.use_f32_scales:
        return scale
    (bits,) = struct.unpack("<I", struct.pack("<f", scale))
    return np.float32(struct.unpack("<f", struct.pack("<I", bits & 0xFF800000))[0])


def slow_mx_scale(amax: np.float32, largest: np.float32) -> np.float32:
    value = amax * np.float32(1 / largest)
    if math.isinf(value):
        byte = 0xFE
    elif value == 0:
        byte = 0
    else:
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        byte, mantissa = bits >> 23, bits & 0x7FFFFF
        if (mantissa > 0 and byte != 0xFE) and not (byte == 0 and mantissa <= 0x400000):
            byte += 1
    bits = 0x00400000 if byte == 254 else (254 - byte) << 23
    return np.float32(struct.unpack("<f", struct.pack("<I", bits))[0])


def slow_copies(values: Tensor, recipe: Precision, role: Role) -> tuple[FP32, FP32, FP32, FP32]:
    """What TE decodes the rowwise copy to, its scale_inv of each element, and the same of the columnwise copy."""
    size = 32 if recipe.scaling == "mxfp8" else 128
    square = recipe.scaling == "block" and role == "weight"
    code = E5M2 if recipe.block.fp8_format == "HYBRID" and role == "grad_output" else E4M3
    numbers = values.detach().float().numpy()
    made: list[FP32] = []
    for high, wide in ((size, size), (size, size)) if square else ((1, size), (size, 1)):
        codes, inverse = np.empty_like(numbers), np.empty_like(numbers)
        for top in range(0, numbers.shape[0], high):
            for left in range(0, numbers.shape[1], wide):
                here = np.s_[top : top + high, left : left + wide]
                amax = np.fmax.reduce(np.abs(numbers[here]).ravel(), initial=np.float32(0))
                scale = slow_scale(amax, recipe, role, values.dtype)
                scaled = numbers[here] * scale
                codes[here] = np.array([slow_cast(each, code) for each in scaled.ravel()]).reshape(scaled.shape)
                inverse[here] = np.float32(1) / scale
        made += [codes, inverse]
    return made[0], made[1], made[2], made[3]


def quantized(values: Tensor, recipe: Precision, role: Role) -> Quantized:
    return stateless_quantizers(recipe, values.dtype)[role].quantize(values)


def by_element(operand: Operand, columns: int) -> tuple[FP32, FP32]:
    """Codes and multipliers of each element; zeros may fill the last group."""
    groups = operand.scale_inv.shape[1]
    inverse = operand.scale_inv.repeat_interleave(operand.codes.shape[1] // groups, 1)
    assert not operand.codes[:, columns:].float().any()
    return operand.codes.float().numpy()[:, :columns], inverse.numpy()[:, :columns]


def check(values: Tensor, recipe: Precision, role: Role) -> None:
    made = quantized(values, recipe, role)
    assert made.columns is not None
    row_codes, row_inverse, column_codes, column_inverse = slow_copies(values, recipe, role)
    for operand, codes, inverse in (
        (made.rows, row_codes, row_inverse),
        (made.columns, column_codes.T, column_inverse.T),
    ):
        found_codes, found_inverse = by_element(operand, codes.shape[1])
        assert np.array_equal(found_inverse, inverse)
        assert np.array_equal(found_codes, codes, equal_nan=True)


def spread(rows: int, columns: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Magnitudes over fifty binades, some zeros, a whole block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-40, 10, (rows, columns), generator=generator)
    values = torch.randn(rows, columns, generator=generator) * torch.exp2(exponents)
    values[torch.rand(rows, columns, generator=generator) < 0.05] = 0
    values[:1, :32] = 0
    values[:32, :1] = 0
    return values.to(dtype)


@pytest.mark.parametrize("role", IN_USE)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(32, 160), (130, 96)], ids=str)
def test_codes_and_scales_of_both_copies_are_those_of_te_s_kernels(
    shape: tuple[int, int], recipe: str, role: Role
) -> None:
    dtype = torch.float32 if recipe == "block, FP32 scales" and role == "input" else torch.bfloat16
    check(spread(*shape, seed=shape[0], dtype=dtype), RECIPES[recipe], role)


@pytest.mark.parametrize("recipe", first(1, RECIPES))
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32) | st.sampled_from([0.0, math.inf, math.nan, 3e38, 1e-38, 1e-45]), min_size=1),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_any_numbers_at_all(recipe: str, numbers: list[float], dtype: torch.dtype) -> None:
    values = torch.tensor(numbers, dtype=torch.float32).to(dtype)
    check(values[None, :40], RECIPES[recipe], "input")
    check(values[:40, None], RECIPES[recipe], "weight")


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    # each recipe in BF16; in FP32 one of either kind of block, whose products are the same with other numbers
    [
        *((recipe, torch.bfloat16) for recipe in RECIPES),
        *(("block", torch.float32), ("mxfp8", torch.float32)),
        *in_soak(*((recipe, torch.float32) for recipe in RECIPES if recipe not in ("block", "mxfp8"))),
    ],
)
def test_each_product_multiplies_the_copies_along_what_it_sums_over(recipe: str, dtype: torch.dtype) -> None:
    tokens, rows, columns = 64, 192, 160
    linear = backend_of(RECIPES[recipe], dtype).linear("linear", columns, rows, True)
    assert linear.bias is not None
    torch.nn.init.normal_(linear.bias)
    torch.nn.init.normal_(linear.weight)
    generator = torch.Generator().manual_seed(0)
    values, gradient = (torch.randn(tokens, size, generator=generator).to(dtype) for size in (columns, rows))
    values[:, 3] *= 10000  # an outlier channel: the two copies differ
    gradient[5] /= 1000
    values.requires_grad_()
    out = linear(values)
    out.backward(gradient)
    assert values.grad is not None and linear.weight.grad is not None

    def copies(tensor: Tensor, role: Role) -> tuple[Tensor, Tensor]:
        row, row_inverse, column, column_inverse = slow_copies(tensor, RECIPES[recipe], role)
        return torch.tensor(row.astype(np.float64) * row_inverse), torch.tensor(
            column.astype(np.float64) * column_inverse
        )

    (x, x_by_column), (w, w_by_column) = copies(values, "input"), copies(linear.weight, "weight")
    g, g_by_column = copies(gradient, "grad_output")
    assert not torch.equal(x, x_by_column)
    bias = linear.bias.detach().bfloat16().double()
    assert_rounded_once(out.detach(), x, w.t(), 1.0, bias)
    assert_rounded_once(values.grad, g, w_by_column, 1.0)
    assert_rounded_once(linear.weight.grad, g_by_column.t(), x_by_column, 1.0)
    assert linear.fp8_state() is None


@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
def test_a_norm_is_rounded_before_it_is_cast(recipe: str) -> None:
    """normalization.cpp, rmsnorm_fwd: both are UNFUSED, norm first and cast after."""
    backend = backend_of(RECIPES[recipe])
    fused = backend.layer_norm_linear("fused", 64, 64, False, Norm("RMSNorm", 1e-5), None)
    torch.nn.init.normal_(fused.layer_norm_weight)
    alone = backend.linear("alone", 64, 64, False)
    alone.load_state_dict({"weight": fused.weight})
    values = torch.randn(32, 64).bfloat16()
    assert torch.equal(fused(values), alone(fused.gemm_input(values).bfloat16()))


def test_sizes_are_held_to_what_te_takes_of_each() -> None:
    """Float8BlockScaling fills blocks at the edges, and its GEMM needs multiples of 16 (cublaslt_gemm.cu); MXFP8 has no
    such blocks (quantizer.cpp, MXFP8Quantizer::get_scale_shape)."""
    block, mxfp8 = backend_of(PRESETS["fp8-block"]), backend_of(PRESETS["mxfp8"])
    block.linear("linear", 48, 80, False)(torch.randn(16, 48).bfloat16())
    with pytest.raises(PrecisionError, match=r"80 by 48: MXFP8 GEMMs need multiples of 32.*linear"):
        mxfp8.linear("linear", 48, 80, False)
    linear = mxfp8.linear("linear", 32, 64, False)
    linear(torch.randn(32, 32).bfloat16())
    with pytest.raises(PrecisionError, match="a batch of tokens of 16: MXFP8 GEMMs"):
        linear(torch.randn(16, 32).bfloat16())
    with pytest.raises(PrecisionError, match="need multiples of 16"):
        block.linear("linear", 24, 80, False)


@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
def test_experts_are_linears_of_their_own_tokens_and_blocks_begin_with_each(recipe: str) -> None:
    counts = [40, 0, 3, 90]
    backend = backend_of(RECIPES[recipe])
    grouped = backend.grouped_linear("experts", len(counts), 64, 96, False, None)
    values, gradient = torch.randn(sum(counts), 64).bfloat16(), torch.randn(sum(counts), 96).bfloat16()
    values.requires_grad_()
    out = grouped(values, counts)
    out.backward(gradient)
    start = 0
    for expert, count in enumerate(counts):
        weight = grouped.get_parameter(f"weight{expert}")
        here = slice(start, start + count)
        start += count
        assert weight.grad is not None
        if not count:
            assert not weight.grad.any()
            continue
        _, _, x, x_inverse = slow_copies(values[here], RECIPES[recipe], "input")
        _, _, g, g_inverse = slow_copies(gradient[here], RECIPES[recipe], "grad_output")
        product = torch.tensor((g.astype(np.float64) * g_inverse).T @ (x.astype(np.float64) * x_inverse))
        torch.testing.assert_close(weight.grad.double(), product, rtol=2**-8, atol=1e-4)
    assert grouped.fp8_state() is None
