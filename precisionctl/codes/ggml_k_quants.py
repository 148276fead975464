"""ggml's K-quants, made of values: blocks of 256, whose groups have integer scales under an FP16 one.

A group's scale, and its minimum, are searched: of some twenty candidates each rounds the group to codes, which give the
scale that fits them best, and the candidate with the least error is kept. All sums are FP32, term after term, as C adds
them, and no product is joined with a sum: ggml-base is compiled for any x86-64, which has no such instruction. So the
bytes are those of llama.cpp's programs there. Here each step is one over the groups of many blocks: `[values of a
group, groups]`, so that a sum is one of rows.

Source: ggml's ggml-quants.c (make_qx_quants, make_qkx2_quants, quantize_row_q4_K_ref, quantize_row_q5_K_ref,
quantize_row_q6_K_ref), without importance matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from precisionctl.codes import numerics
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

_TOGETHER = 512
"""Blocks that are made at once: the arrays of a search stay in a core's cache."""
_TINY = 1e-15
"""A group of smaller magnitudes is one of zeros (GROUP_MAX_EPS)."""
_FAR = 2.0**22
"""ggml rounds to an integer by adding 1.5 * 2^23, which leaves something else of numbers from here on."""


def q6_k(values: Tensor) -> Tensor:
    """Bytes `[blocks, 210]` of FP32 `[blocks, 256]`: a code has six bits, and 16 values share a signed scale."""
    return torch.cat([_q6_k(part) for part in torch.split(values, _TOGETHER)])


def q4_k(values: Tensor) -> Tensor:
    """Bytes `[blocks, 144]`: a code has four bits, and 32 values share a scale and a minimum."""
    return torch.cat([_above_minimums(part, 15, -1.0, 20) for part in torch.split(values, _TOGETHER)])


def q5_k(values: Tensor) -> Tensor:
    """Bytes `[blocks, 176]`: the same with codes of five bits."""
    return torch.cat([_above_minimums(part, 31, -0.5, 15) for part in torch.split(values, _TOGETHER)])


def _in_groups(values: Tensor, size: int) -> Tensor:
    """`[size, groups]`, contiguous."""
    return values.reshape(-1, size).t().contiguous()


def _sums(terms: Tensor) -> Tensor:
    """Sums of columns, row after row. torch.sum has an order of its own."""
    found: Tensor = torch.from_numpy(np.add.reduce(terms.numpy(), 0))
    return found


def _integers(numbers: Tensor) -> Tensor:
    """Integers as ggml rounds any number to (nearest_int)."""
    return ((numbers + 1.5 * 2**23).view(torch.int32) & 0x7FFFFF) - 0x400000


def _quotient(number: float | np.float32, of: Tensor) -> Tensor:
    """`number / of`, rounded once: PyTorch multiplies a number by the reciprocal."""
    return torch.tensor(number, dtype=torch.float32) / of


def _fp16(numbers: Tensor) -> Tensor:
    return numbers.half().view(-1, 1).view(torch.uint8)


def _q6_k(values: Tensor) -> Tensor:
    x = _in_groups(values, 16)
    scales, codes_of = _symmetric_scales(x)
    by_block = scales.view(-1, 16)
    largest = numerics.of_largest_magnitude(by_block)
    zero = largest.abs() < _TINY
    inverse = _quotient(-128, torch.where(zero, 1.0, largest))
    scale = inverse.reciprocal().half()
    integers = _integers(inverse * by_block).clamp_(max=127)
    steps = (scale.float() * integers).view(-1)
    codes = (x / steps).round_().clamp_(-32, 31)
    if len(left := (steps == 0).nonzero().view(-1)):
        codes[:, left] = codes_of(left)
    # of each half of a block, four runs of 32
    packed = codes.add_(32).to(torch.uint8).t().reshape(-1, 2, 4, 32)
    first, second, third, fourth = packed.unbind(2)
    low = torch.stack((first & 15 | third << 4, second & 15 | fourth << 4), 2)
    high = first >> 4 | second >> 4 << 2 | third >> 4 << 4 | fourth >> 4 << 6
    parts = [low.view(-1, 128), high.view(-1, 64), integers.to(torch.int8).view(torch.uint8), _fp16(scale)]
    return torch.cat(parts, 1).masked_fill_(zero, 0)


def _symmetric_scales(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The scale of each group, and the codes from -32 to 31 that were found with it, of groups with these numbers."""
    largest = numerics.of_largest_magnitude(x.t()).view(-1)
    zero = largest.abs() < _TINY
    largest = torch.where(zero, 1.0, largest)
    weights = x * x
    weighted, codes, terms = weights * x, torch.empty_like(x), torch.empty_like(x)

    def fitted(inverse: Tensor) -> tuple[Tensor, Tensor]:
        torch.mul(x, inverse, out=codes).round_().clamp_(-32, 31)
        products = _sums(torch.mul(weighted, codes, out=terms))
        return products, _sums(torch.mul(weights, codes, out=terms).mul_(codes))

    kept = _quotient(-32, largest)
    products, squares = fitted(kept)
    scales = torch.where(squares == 0, 0.0, products / squares)
    best = scales * products
    for step in (*range(-9, 0), *range(1, 10)):
        inverse = _quotient(-(32 + np.float32(0.1) * np.float32(step)), largest)
        products, squares = fitted(inverse)
        better = (squares > 0) & (products * products > best * squares)
        fit = products / squares
        scales, best = torch.where(better, fit, scales), torch.where(better, fit * products, best)
        kept = torch.where(better, inverse, kept)
    scales[zero] = 0.0

    def codes_of(groups: Tensor) -> Tensor:
        found = (x[:, groups] * kept[groups]).round_().clamp_(-32, 31)
        return torch.where(zero[groups], -32.0, found)

    return scales, codes_of


def _above_minimums(values: Tensor, most: int, first: float, steps: int) -> Tensor:
    """Blocks of codes up to `most`, of which a value is `code * scale - minimum`. Further scales are tried, by which
    the largest becomes `most + first`, and so on in `steps` of a tenth."""
    x = _in_groups(values, 32)
    scales, minimums, codes_of = _scales_and_minimums(x, most, first, steps)
    scale, scales_in_block = _six_bits(scales.view(-1, 8))
    minimum, minimums_in_block = _six_bits(minimums.view(-1, 8))
    step = (scale.float() * scales_in_block).view(-1)
    codes = _integers((x + (minimum.float() * minimums_in_block).view(-1)) / step).clamp_(0, most)
    if len(left := (step == 0).nonzero().view(-1)):
        codes[:, left] = codes_of(left).to(torch.int32)
    by_group = codes.to(torch.uint8).t().reshape(-1, 8, 32)
    low = by_group[:, ::2] & 15 | by_group[:, 1::2] << 4
    parts = [_fp16(scale), _fp16(minimum), _packed(scales_in_block, minimums_in_block)]
    if most > 15:
        parts.append(by_group[:, 0] >> 4)
        for group in range(1, 8):
            parts[-1] |= by_group[:, group] >> 4 << group
    return torch.cat([*parts, low.reshape(-1, 128)], 1)


def _six_bits(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """FP16 scales `[blocks, 1]`, and integers `[blocks, 8]`, bytes, of numbers, of which none is below 0."""
    largest = numbers.amax(1, keepdim=True)
    largest = torch.where(largest > 0, largest, 0.0)  # and no -0
    inverse = torch.where(largest > 0, _quotient(63, largest), 0.0)
    integers = _integers(inverse * numbers).to(torch.uint8)
    return (largest / 63).half(), integers.clamp_(max=63)


def _packed(scales: Tensor, minimums: Tensor) -> Tensor:
    """Twelve bytes of eight scales and eight minimums (`_scales_and_minimums` of `ggml_formats.py`)."""
    (low, high), (low_minimums, high_minimums) = scales.chunk(2, 1), minimums.chunk(2, 1)
    firsts = (low | high >> 4 << 6, low_minimums | high_minimums >> 4 << 6)
    return torch.cat([*firsts, high & 15 | high_minimums << 4], 1)


def _scales_and_minimums(
    x: Tensor, most: int, first: float, steps: int
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """The scale and the minimum of each group, this with the other sign, and the codes that were found with them, of
    groups with these numbers."""
    codes, terms, further = (torch.empty_like(x) for _ in range(3))
    squares = _sums(torch.mul(x, x, out=terms)) / 32
    weights = x.abs().add_(torch.from_numpy(np.sqrt(squares.numpy())))  # torch.sqrt may be off by a last bit
    of_weights, of_values = _sums(weights), _sums(torch.mul(weights, x, out=terms))
    lowest, highest = x.amin(0), x.amax(0)
    minimum = lowest.clamp(max=0)
    flat = highest == minimum

    def coded(inverse: Tensor, minimum: Tensor, groups: Tensor | slice, into: Tensor) -> Tensor:
        torch.sub(x[:, groups], minimum, out=into).mul_(inverse)
        ends = [((each[groups] - minimum) * inverse).abs_() for each in (lowest, highest)]
        far = (torch.maximum(*ends) < _FAR).logical_not_().nonzero().view(-1)  # of NaN, too
        others = _integers(into[:, far]).clamp_(0, most).float()
        into.round_().clamp_(0, most)[:, far] = others
        return into

    def error(scale: Tensor, minimum: Tensor) -> Tensor:
        torch.mul(codes, scale, out=terms).add_(minimum).sub_(x)
        return _sums(terms.mul_(terms).mul_(weights))

    inverse = _quotient(most, highest - minimum)
    scale = inverse.reciprocal()
    coded(inverse, minimum, slice(None), codes)
    best, kept = error(scale, minimum), (inverse, minimum)
    for step in range(steps + 1):
        tried = np.float32(first) + np.float32(0.1) * np.float32(step) + np.float32(most)
        inverse = _quotient(tried, highest - minimum)
        coded(inverse, minimum, slice(None), codes)
        of_codes = _sums(torch.mul(weights, codes, out=terms))
        products = _sums(torch.mul(terms, x, out=further))
        squares = _sums(terms.mul_(codes))
        divisor = of_weights * squares - of_codes * of_codes
        fit = (of_weights * products - of_values * of_codes) / divisor
        base = (squares * of_values - of_codes * products) / divisor
        above = base > 0
        fit, base = torch.where(above, products / squares, fit), base.masked_fill_(above, 0.0)
        errors = error(fit, base)
        better = (divisor > 0) & (errors < best)
        kept = torch.where(better, inverse, kept[0]), torch.where(better, minimum, kept[1])
        best, scale = torch.where(better, errors, best), torch.where(better, fit, scale)
        minimum = torch.where(better, base, minimum)

    def codes_of(groups: Tensor) -> Tensor:
        found = coded(kept[0][groups], kept[1][groups], groups, codes.new_empty(len(x), len(groups)))
        return torch.where(flat[groups], 0.0, found)

    return torch.where(flat, 0.0, scale), -torch.where(flat, lowest.clamp(max=0), minimum), codes_of
