"""How zero points are packed, number by number."""

import pytest
import torch

from precisionctl.codes import zero_points


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
