"""BF16 products through FP32, where a CPU has no kernels for them: one rounding, of the value and of each gradient."""

import platform
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from precisionctl.model.sparse_parts import MSA
from precisionctl.trainer.backends import bf16_products
from precisionctl.trainer.backends.bf16_products import product
from precisionctl.trainer.model.attention.block_indexer import attend_to_blocks


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_products, "cpu_has_bf16_kernels", lambda: False)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def rounded_once(got: Tensor | None, exact: Tensor | None) -> None:
    """Within half a unit in the last place, and what sums in FP32 add to that."""
    assert got is not None and exact is not None and got.dtype == torch.bfloat16
    error = (got.double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 + 1e-5).all(), error.max()


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_and_its_gradients_are_rounded_once(bias: bool) -> None:
    values, weight, added = randn(48, 96), randn(32, 96), randn(32) if bias else None
    wide = [None if each is None else each.detach().double().requires_grad_() for each in (values, weight, added)]
    out, exact = product(F.linear, values, weight, added), F.linear(*wide)
    rounded_once(out, exact)
    gradient = torch.randn(48, 32).bfloat16()
    out.backward(gradient)
    exact.backward(gradient.double())
    for mine, theirs in zip((values, weight, added), wide, strict=True):
        if mine is not None and theirs is not None:
            rounded_once(mine.grad, theirs.grad)


@pytest.mark.usefixtures("without_kernels")
def test_attention_is_rounded_once() -> None:
    query, key, value = (randn(2, 4, 16, 8) for _ in range(3))
    attention = partial(F.scaled_dot_product_attention, is_causal=True)
    rounded_once(product(attention, query, key, value), attention(query.double(), key.double(), value.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.usefixtures("without_kernels")
def test_other_dtypes_are_computed_in_themselves(dtype: torch.dtype) -> None:
    values, weight = randn(4, 8, dtype=dtype), randn(6, 8, dtype=dtype)
    assert torch.equal(product(F.linear, values, weight), F.linear(values, weight))


def test_operands_are_passed_as_they_are_where_there_are_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_products, "cpu_has_bf16_kernels", lambda: True)
    values, weight, seen = randn(4, 8), randn(6, 8), []

    def compute(*operands: Tensor | None) -> Tensor:
        seen.extend(operands)
        return F.linear(*operands)  # type: ignore[arg-type]

    product(compute, values, weight, None)
    assert [id(operand) for operand in seen] == [id(values), id(weight), id(None)]


@pytest.mark.soak
@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN takes this limit on x86 alone")
def test_a_cpu_with_avx2_alone_has_no_kernels() -> None:
    """PyTorch asks oneDNN, which can be told to take a CPU for a lesser one."""
    environment = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    code = "from precisionctl.trainer.backends.bf16_products import cpu_has_bf16_kernels as has; print(has())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("averaged", [False, True])
def test_attention_to_blocks_is_computed_in_fp32_too(averaged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_products, "cpu_has_bf16_kernels", lambda: False)
    msa = MSA(2, 8, block_size=4, topk_blocks=2, local_blocks=1, layers=(True,), averaged=averaged)
    torch.manual_seed(0)
    sizes = ((4, 8), (2, 8), (2, 8), (2, 8), (1, 8))  # of queries, keys and values, and of the indexer's two
    heads = [torch.randn(2, 16, *size).bfloat16() for size in sizes]
    wide = attend_to_blocks([each.float() for each in heads], msa, 0.3)
    assert torch.equal(attend_to_blocks(heads, msa, 0.3), wide.bfloat16())
