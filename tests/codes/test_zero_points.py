"""How zero points are packed, number by number, and joined."""

import pytest
import torch

from precisionctl.codes import zero_points
from precisionctl.codes.elements import INT4, INT8_PLUS_128, Element
from precisionctl.codes.encoding import Encoding, joined


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_are_packed_along_rows_and_come_back(bits: int) -> None:
    """Also where the last word is not full."""
    each, middle = 32 // bits, 1 << bits - 1
    codes = torch.randint(2 * middle, (24, 3), generator=torch.Generator().manual_seed(0))
    codes[20:] = 0
    words = torch.tensor(
        [
            [sum(int(codes[each * r + i, g]) << bits * i for i in range(each)) for g in range(3)]
            for r in range(24 // each)
        ]
    )
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    zeros = codes.float() - middle
    assert torch.equal(zero_points.unpacked(words, 24, bits), zeros)
    assert torch.equal(zero_points.unpacked(words, 20, bits), zeros[:20])
    assert torch.equal(zero_points.packed(zeros, bits), words)
    if bits == 4:  # of 20 rows, the last word has four
        assert torch.equal(zero_points.packed(zeros[:20], bits), words)


@pytest.mark.parametrize("groups", [(32, 32), (32, 64), (64, 16)])
@pytest.mark.parametrize("with_zeros", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("element", [INT4, INT8_PLUS_128], ids=lambda element: element.name)
def test_rows_below_each_other_decode_as_they_do_apart(
    element: Element, groups: tuple[int, int], with_zeros: tuple[bool, bool]
) -> None:
    generator, parts = torch.Generator().manual_seed(0), []
    for group, zeros, rows in zip(groups, with_zeros, (3, 5), strict=True):
        codes = torch.randint(256, (rows, 64 * element.bits // 8), generator=generator).to(torch.uint8)
        scales = torch.rand(rows, 64 // group, generator=generator) + 0.5
        points = torch.randint(-8, 8, scales.shape, generator=generator).float() if zeros else None
        parts.append((codes, Encoding(element, scales, (1, group), zeros=points)))
    whole = joined([encoding for _, encoding in parts], 64)
    apart = torch.cat([encoding.decode_rows(codes, 0) for codes, encoding in parts])
    assert torch.equal(whole.decode_rows(torch.cat([codes for codes, _ in parts]), 0), apart)
