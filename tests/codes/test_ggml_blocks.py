"""Blocks are, bit for bit, what ggml's C code makes of the same values (tests/golden/ggml_blocks.py)."""

import pytest
import repository
import torch
from safetensors.torch import load_file

from precisionctl.codes import ggml_k_quants
from precisionctl.codes.ggml_blocks import ENCODED, blocks_of
from precisionctl.codes.ggml_formats import named

GOLDEN = load_file(repository.GOLDEN / "ggml_blocks.safetensors")


def of_rows(name: str) -> torch.Tensor:
    return GOLDEN[f"{name.lower().replace('_k', '_K')}.of_rows"]


@pytest.mark.parametrize("name", ENCODED)
def test_blocks_are_those_of_ggml_to_the_last_bit(name: str) -> None:
    found = blocks_of(named(name)).encode(GOLDEN["rows"])
    differing = (found != of_rows(name)).any(1).nonzero().view(-1).tolist()
    assert not differing, [GOLDEN["rows"][row, :8] for row in differing]


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_a_block_does_not_depend_on_those_that_are_made_with_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml_k_quants, "_TOGETHER", 5)
    assert torch.equal(blocks_of(named(name)).encode(GOLDEN["rows"]), of_rows(name))
    shuffled = torch.randperm(len(GOLDEN["rows"]), generator=torch.Generator().manual_seed(0))
    assert torch.equal(blocks_of(named(name)).encode(GOLDEN["rows"][shuffled]), of_rows(name)[shuffled])


@pytest.mark.parametrize("name", ENCODED)
def test_the_largest_numbers_that_are_taken_have_finite_scales(name: str) -> None:
    blocks, generator = blocks_of(named(name)), torch.Generator().manual_seed(0)
    shapes = torch.rand(64, 256, generator=generator) * 2 - 1
    shapes = torch.cat([shapes, shapes.pow(9), shapes.sign(), -shapes.abs(), torch.eye(256), -torch.eye(256)])
    values = blocks.largest * shapes / shapes.abs().amax(1, keepdim=True)
    assert blocks.rounded(values).isfinite().all()
