"""Four-bit codes against a slow definition: every code, every scale, every tie."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from precisionctl.codes import nibbles
from precisionctl.codes.elements import E2M1, INT4, Element
from precisionctl.codes.encoding import Encoding, GlobalScale

MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
ELEMENTS = (E2M1, INT4)
BYTES = torch.arange(256, dtype=torch.uint8)
EVERY_E4M3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
EVERY_BF16 = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
GLOBALS = [1.0, 3.0e-5, 7.77e-4, 0.0123456789, 1 / 3, 2688.0, 2096.0, 1.0e-30, 1.7e30]
SCRATCH = torch.empty(10_000)


def number_of(code: int, element: Element) -> float:
    """From the bits."""
    return math.copysign(MAGNITUDES[code % 8], -1 if code & 8 else 1) if element == E2M1 else float(code - 8)


def code_of(value: float, element: Element) -> int:
    """The nearest, of two the even one; the sign of zero is that of the value. FP64 holds what differs near a tie."""
    signs = {0, 8} if element == INT4 else {8 * (math.copysign(1, value) < 0)}
    near = [(number_of(sign + code, element), sign + code) for sign in signs for code in range(8)]
    value = max(-100.0, min(100.0, value))
    return min(near, key=lambda of: (abs(value - of[0]), of[1] % 2))[1]


def decoded(packed: Tensor, element: Element, scales: Tensor, columns: int | None = None) -> Tensor:
    values = torch.empty(len(packed), columns or 2 * packed.shape[1])
    nibbles.decode(packed, element, scales, values, SCRATCH)
    return values


def encoded(values: Tensor, element: Element, scales: Tensor, size: int | None = None) -> Tensor:
    packed = torch.empty(len(values), size or values.shape[1] // 2, dtype=torch.uint8)
    nibbles.encode(values, element, scales, packed, SCRATCH)
    return packed


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view({2: torch.int16, 4: torch.int32}[values.dtype.itemsize])


def exactly(values: np.ndarray) -> Tensor:
    """FP64 that is exact, or wider than twice FP32, rounded once."""
    with np.errstate(over="ignore"):
        return torch.from_numpy(values.astype(np.float32))


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda element: element.name)
def test_every_byte_is_two_codes_the_first_in_the_low_half(element: Element) -> None:
    expected = [[number_of(byte % 16, element), number_of(byte // 16, element)] for byte in range(256)]
    found = decoded(BYTES.view(-1, 1), element, torch.ones(256, 1))
    assert torch.equal(bits(found), bits(torch.tensor(expected)))
    assert torch.equal(nibbles.unpack(BYTES.view(-1, 1)), torch.tensor([[b % 16, b // 16] for b in range(256)]))
    assert torch.equal(nibbles.pack(nibbles.unpack(BYTES)), BYTES)


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_any_bits_are_one_long_number_the_first_lowest(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 24), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    numbers = [sum(code << bits * place for place, code in enumerate(row)) for row in codes.tolist()]
    expected = torch.tensor([list(number.to_bytes(3 * bits, "little")) for number in numbers], dtype=torch.uint8)
    assert torch.equal(nibbles.pack_bits(codes, bits), expected)
    assert torch.equal(nibbles.unpack_bits(expected, bits), codes)


def test_eight_in_an_int32_are_the_same_bytes() -> None:
    numbers = torch.randint(-8, 8, (3, 40), generator=torch.Generator().manual_seed(0))
    words = ((numbers + 8).view(3, 5, 8) << (4 * torch.arange(8))).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    assert torch.equal(decoded(words.view(torch.uint8), INT4, torch.ones(3, 1)), numbers.float())
    assert torch.equal(encoded(numbers.float(), INT4, torch.ones(3, 1)).view(torch.int32), words)


def test_numbers_of_e2m1_are_those_of_its_bits() -> None:
    """Sign, two bits of exponent of bias 1, one of mantissa."""
    for code, number in enumerate(nibbles.CODE_VALUES[E2M1]):
        exponent, mantissa = code >> 1 & 3, code & 1
        magnitude = (1 + mantissa / 2) * 2 ** (exponent - 1) if exponent else mantissa / 2
        assert number == magnitude * (-1) ** (code >> 3) and math.copysign(1, number) == (-1) ** (code >> 3)


def near(points: list[float]) -> Iterator[float]:
    for point in points:
        value = np.float32(point)
        yield from (float(np.nextafter(value, np.float32(to))) for to in (-np.inf, value, np.inf))


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda element: element.name)
def test_every_bf16_value_and_every_neighbour_of_a_tie_has_the_code_of_the_definition(element: Element) -> None:
    every = torch.cat([EVERY_BF16, -EVERY_BF16]).float().tolist() + [0.0, -0.0, math.inf, -math.inf]
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7] if element == E2M1 else [i / 2 for i in range(20)]
    values = every + list(near([sign * tie for tie in ties for sign in (1, -1)]))
    values += [0.0] * (len(values) % 2)
    expected = [code_of(value, element) for value in values]
    assert nibbles.unpack(encoded(torch.tensor([values]), element, torch.ones(1, 1))).tolist() == [expected]


def test_of_two_numbers_that_are_as_near_mlx_takes_the_smaller() -> None:
    magnitudes = [*EVERY_BF16.float().tolist(), 0.0, *near([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7])]
    expected = [min(range(8), key=lambda code: (abs(min(each, 6) - MAGNITUDES[code]), code)) for each in magnitudes]
    assert nibbles.to_e2m1_or_less(torch.tensor(magnitudes)).tolist() == expected


def test_every_code_under_every_scale_of_nvfp4_is_the_definition_and_comes_back_from_bf16() -> None:
    """`number * f32(scale * global)`, or with a divisor. FP64 holds the product of scale and global, and its quotient
    rounded twice is the one rounded once. BF16 must hold what the codes are: scales from 2^-131 on."""
    packed = BYTES.expand(len(EVERY_E4M3), -1).contiguous()
    numbers = np.array([number_of(code, E2M1) for code in nibbles.unpack(BYTES).tolist()])
    seen = 0
    for number, divisor in itertools.product(GLOBALS, (False, True)):
        exact_global = np.float64(np.float32(number))
        scale = EVERY_E4M3.float().numpy().astype(np.float64)
        expected_scale = exactly(scale / exact_global if divisor else scale * exact_global)
        scales = GlobalScale(torch.tensor(number), divisor).times(EVERY_E4M3)
        assert torch.equal(bits(scales), bits(expected_scale))
        values = decoded(packed, E2M1, scales.view(-1, 1))
        expected = exactly(scales.numpy().astype(np.float64)[:, None] * numbers)
        assert torch.equal(bits(values), bits(expected))
        usable = (scales >= 2.0**-131) & (6 * scales.double() < EVERY_BF16[-1].double())
        again = encoded(values.bfloat16()[usable], E2M1, scales[usable].view(-1, 1))
        assert torch.equal(again, packed[usable])
        seen += int(usable.sum())
    assert seen > 2000


def test_every_code_under_every_scale_of_mxfp4_is_the_definition_and_comes_back_from_bf16() -> None:
    stored = torch.arange(255, dtype=torch.uint8)
    scales = stored.view(torch.float8_e8m0fnu).float().view(-1, 1)
    assert scales.view(-1).tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    packed = BYTES.expand(255, -1).contiguous()
    values = decoded(packed, E2M1, scales)
    numbers = np.array([number_of(code, E2M1) for code in nibbles.unpack(BYTES).tolist()])
    assert torch.equal(bits(values), bits(exactly(scales.numpy().astype(np.float64) * numbers)))
    below = 253  # 6 * 2^126 is beyond FP32
    assert torch.equal(values.bfloat16().float()[:below], values[:below])
    assert torch.equal(encoded(values.bfloat16()[:below], E2M1, scales[:below]), packed[:below])


def test_every_code_under_every_bf16_scale_of_int4_is_the_definition_and_comes_back_from_bf16() -> None:
    """The product of 4 and 8 bits is exact in FP32: so BF16 is the exact product rounded once, as by
    compressed-tensors, which multiplies in BF16."""
    packed = nibbles.pack(torch.arange(16)).expand(len(EVERY_BF16), -1).contiguous()
    values = decoded(packed, INT4, EVERY_BF16.float().view(-1, 1))
    exact = EVERY_BF16.double().view(-1, 1) * torch.arange(-8, 8)
    assert torch.equal(values.double()[EVERY_BF16 < 2e37], exact[EVERY_BF16 < 2e37])
    theirs = torch.arange(-8, 8).to(torch.bfloat16) * EVERY_BF16.view(-1, 1)
    assert torch.equal(bits(values.bfloat16() + 0), bits(theirs + 0))
    finite = 8 * EVERY_BF16.double() <= EVERY_BF16[-1].double()
    again = encoded(values.bfloat16()[finite], INT4, EVERY_BF16.float()[finite].view(-1, 1))
    assert int(finite.sum()) > 32000 and torch.equal(again, packed[finite])


def test_every_code_under_every_zero_point_comes_back_from_bf16() -> None:
    scales = EVERY_BF16[300:-600:31].float()
    pairs = torch.tensor(list(itertools.product(range(16), range(16))))
    for scale in torch.split(scales, 200):
        packed = nibbles.pack(pairs[:, :1].expand(-1, 2)).repeat(len(scale), 1)
        zeros = (pairs[:, 1:] - 8).float().repeat(len(scale), 1)
        by = scale.repeat_interleave(256).view(-1, 1)
        values, again = torch.empty(len(by), 2), torch.empty_like(packed)
        nibbles.decode(packed, INT4, by, values, SCRATCH, zeros)
        expected = (pairs[:, 0] - pairs[:, 1]).double().repeat(len(scale)) * by.view(-1).double()
        assert torch.equal(values[:, 0].double(), expected) and torch.equal(values[:, 1], values[:, 0])
        nibbles.encode(values.bfloat16(), INT4, by, again, SCRATCH, zeros)
        assert torch.equal(again, packed)


SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 40), st.integers(0, 7), st.integers(1, 500))


@given(SHAPES, st.sampled_from(ELEMENTS), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_shapes_groups_filling_and_pieces_do_not_matter(
    shape: tuple[int, int, int, int, int], element: Element, seed: int
) -> None:
    """As one group for each element, and one row at a time."""
    rows, groups, width, filling, room = shape
    columns, generator = groups * width, torch.Generator().manual_seed(seed)
    size = (columns + filling + 1) // 2
    values = torch.randn(rows, columns, generator=generator).mul_(5).bfloat16()
    scales = torch.rand(rows, groups, generator=generator) + 0.5
    packed, back = torch.full((rows, size), 255, dtype=torch.uint8), torch.empty(rows, columns)
    nibbles.encode(values, element, scales, packed, torch.empty(room))
    nibbles.decode(packed, element, scales, back, torch.empty(room))
    codes = nibbles.unpack(packed)
    by_element = scales.repeat_interleave(width, 1)
    for row in range(rows):
        quotients = (values[row].float() / by_element[row]).tolist()
        assert codes[row, :columns].tolist() == [code_of(value, element) for value in quotients]
        numbers = torch.tensor([number_of(code, element) for code in codes[row, :columns].tolist()])
        assert torch.equal(bits(back[row]), bits(numbers * by_element[row]))
    assert set(codes[:, columns:].flatten().tolist()) <= {code_of(0.0, element)}
    again = torch.empty_like(packed)
    nibbles.encode(back, element, by_element, again, SCRATCH)
    assert torch.equal(again, packed)


def test_an_element_without_numbers_here_is_not_taken_for_another() -> None:
    other = replace(INT4, name="UINT4", stored="uint4")
    values, packed = torch.ones(1, 2), torch.zeros(1, 1, dtype=torch.uint8)
    with pytest.raises(KeyError):
        Encoding(other, torch.ones(1, 1), (1, 2)).decode_rows(packed, 0)
    with pytest.raises(KeyError):
        Encoding(other, torch.ones(1, 1), (1, 2)).encode_rows(values, 0)
    with pytest.raises(KeyError):
        nibbles.squared_errors(values, other, [torch.ones(1, 1)], SCRATCH)
