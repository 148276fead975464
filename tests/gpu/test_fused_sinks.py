"""Sinks by PyTorch's fused attention on a GPU, against a softmax written out on the CPU."""

from dataclasses import replace

import pytest
import torch
from sinks import written_out
from te_pairs import SHAPES, sqnr

from precisionctl.precision import PRESETS
from precisionctl.trainer.backends.choose import make_backend
from precisionctl.trainer.model.attention.core_attention import CoreAttention
from precisionctl.trainer.sequences import PackedSequences, Positions

HEADS, GROUPS, LENGTH = 8, 2, 200


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed rows"])
@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize("size", [64, 128])
def test_outputs_and_gradients_are_those_of_a_softmax_with_one_more_score(
    size: int, window: int | None, packed: bool
) -> None:
    sizes = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "kv_channels": size}
    backend = make_backend("te", PRESETS["bf16"], torch.bfloat16, torch.device("cuda"))
    ours = CoreAttention(replace(SHAPES["like gpt-oss"], **sizes), backend, size**-0.5)
    assert ours.softmax_offset is not None
    ours.softmax_offset.data.copy_(torch.linspace(-4, 6, HEADS))
    lengths = (77, 123) if packed else (LENGTH,)
    given = [torch.randn(1, LENGTH, number, size).bfloat16() for number in (HEADS, GROUPS, GROUPS)]
    on_gpu = [each.to("cuda", copy=True).requires_grad_() for each in given]
    exact = [each.double().requires_grad_() for each in (*given, ours.softmax_offset.detach().cpu())]
    texts = zip(*(torch.split(each, lengths, 1) for each in exact[:3]), strict=True)
    expected = torch.cat([written_out(*text, exact[3], size**-0.5, window) for text in texts], 1)
    positions = Positions(None, None, window, PackedSequences(lengths) if packed else None, (1, LENGTH))
    found = ours(*on_gpu, positions).view(expected.shape)
    gradient = torch.randn(expected.shape).bfloat16()
    found.backward(gradient.to("cuda"))
    expected.backward(gradient.double())
    made = [found, *(each.grad for each in (*on_gpu, ours.softmax_offset))]
    for one, other in zip(made, (expected, *(each.grad for each in exact)), strict=True):
        assert one is not None and other is not None
        assert sqnr(other, one.cpu()) > 35
