"""Sinks: the score of one more key for each head, whose value is zero, against a softmax written out."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from pico import shape
from sinks import written_out

from precisionctl.precision import PRESETS
from precisionctl.trainer.backends.emulated import EmulatedBackend
from precisionctl.trainer.model.attention.core_attention import CoreAttention
from precisionctl.trainer.sequences import PackedSequences, Positions

HEADS, GROUPS, LENGTH = 6, 2, 33


def attention(dtype: torch.dtype, size: int, value_size: int) -> CoreAttention:
    sizes = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "kv_channels": size, "v_head_dim": value_size}
    backend = EmulatedBackend(PRESETS["bf16"], dtype, torch.device("cpu"))
    made = CoreAttention(replace(shape("gpt-oss"), **sizes), backend, size**-0.5)
    assert made.softmax_offset is not None
    made.softmax_offset.data.copy_(torch.linspace(-4, 6, HEADS))
    return made


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("size", "value_size"), [(64, 64), (24, 24), (48, 32)])  # BF16 has no square root of 24
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_sinks_take_part_in_the_softmax_and_give_nothing(
    dtype: torch.dtype, most: float, size: int, value_size: int, window: int | None
) -> None:
    torch.manual_seed(0)
    ours = attention(dtype, size, value_size)
    sizes = (HEADS, size), (GROUPS, size), (GROUPS, value_size)
    given = [torch.randn(2, LENGTH, *each).to(dtype).requires_grad_() for each in sizes]
    exact = [each.detach().double().requires_grad_() for each in (*given, ours.softmax_offset)]
    expected = written_out(*exact, size**-0.5, window)
    found = ours(*given, Positions(None, None, window, None, (2, LENGTH))).view(expected.shape)
    gradient = torch.randn(expected.shape).to(dtype)
    found.backward(gradient)
    expected.backward(gradient.double())
    for one, other in (
        (found, expected),
        *zip((each.grad for each in (*given, ours.softmax_offset)), (each.grad for each in exact), strict=True),
    ):
        assert (one.double() - other).norm() < most * other.norm()


def test_a_sink_is_as_exact_as_its_parameter() -> None:
    """With queries of zero a score is the sink alone: a share that no rounding of sqrt(24) in BF16 changes."""
    ours = attention(torch.bfloat16, 24, 24)
    ours.softmax_offset.data.fill_(40.0)
    value = torch.full((1, 1, GROUPS, 24), 2.0**60).bfloat16()
    query, key = torch.zeros(1, 1, HEADS, 24).bfloat16(), torch.zeros(1, 1, GROUPS, 24).bfloat16()
    found = ours(query, key, value, Positions(None, None, None, None, (1, 1)))
    assert (found.double().log() - (60 * math.log(2) - 40)).abs().max() < 4e-3  # a half of BF16's last bit is 2e-3


@pytest.mark.parametrize("window", [None, 7])
def test_each_text_of_a_packed_row_has_a_sink_of_its_own(window: int | None) -> None:
    torch.manual_seed(0)
    ours, lengths = attention(torch.float32, 24, 24), (20, 9, 4)
    heads = [torch.randn(1, LENGTH, number, 24) for number in (HEADS, GROUPS, GROUPS)]
    packed: Any = Positions(None, None, window, PackedSequences(lengths), (1, LENGTH))
    texts = zip(*(torch.split(each, lengths, 1) for each in heads), strict=True)
    alone = [ours(*text, Positions(None, None, window, None, (1, text[0].shape[1]))) for text in texts]
    torch.testing.assert_close(ours(*heads, packed), torch.cat(alone))
