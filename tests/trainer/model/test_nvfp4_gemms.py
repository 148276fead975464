"""GEMMs in NVFP4 in the emulation: the products of Transformer Engine's own reference (tests/golden/nvfp4.py), and
gradients that are rounded at random, but the same again in the same pass."""

from collections.abc import Sequence

import pytest
import torch
from emulated_linears import backend_of
from nvfp4_golden import GOLDEN
from torch import Tensor

from precisionctl.codes import nvfp4_scaling
from precisionctl.errors import PrecisionError
from precisionctl.precision import PRESETS
from precisionctl.trainer.backends.base import Norm
from precisionctl.trainer.backends.emulated import EmulatedBackend, Linear
from precisionctl.trainer.backends.fp8_gemm import HadamardQuantizer, SquareQuantizer, nvfp4_quantizers

NVFP4 = PRESETS["nvfp4"]
X, W, G = (GOLDEN[role] for role in ("input", "weight", "grad_output"))


def no_draw() -> torch.Generator:
    raise AssertionError("the forward draws nothing")


def test_the_three_products_are_those_of_te_s_reference() -> None:
    """Within what FP32 sums of so many terms may be off by: the reference multiplies by the FP32 scales once, at the
    end."""
    quantizers = nvfp4_quantizers(no_draw)
    x, w, g = (
        made.quantize(values)
        for made, values in ((quantizers["input"], X), (quantizers["weight"], W), (HadamardQuantizer(), G))
    )
    assert x.columns and w.columns and g.columns
    for left, right, product in ((x.rows, w.rows, "y"), (g.rows, w.columns, "dgrad"), (g.columns, x.columns, "wgrad")):
        magnitude = left.summands().abs() @ right.summands().abs().t()
        error = (right.gemm(left) - GOLDEN[product]).abs()
        terms = left.codes.shape[1] + 8  # an error for each addition, and for each product with a scale
        assert (error <= terms * 2.0**-24 * magnitude).all(), product
        assert GOLDEN[product].abs().max() > 1


def test_what_is_cast_how_is_what_te_s_recipe_says() -> None:
    """NVFP4BlockScaling (common/recipe/__init__.py): 16 x 16 for weights alone, the transform for all but them, random
    rounding for gradients alone."""
    made = nvfp4_quantizers(no_draw)
    assert isinstance(made["weight"], SquareQuantizer) and made["weight"].size == 16
    assert made["input"] == HadamardQuantizer()
    assert made["grad_output"] == HadamardQuantizer(no_draw)


def linear_of(backend: EmulatedBackend) -> Linear:
    linear = backend.linear("linear", W.shape[1], W.shape[0], False)
    linear.load_state_dict({"weight": W})
    return linear


def backward(linear: Linear) -> tuple[Tensor, Tensor]:
    values = X.clone().requires_grad_()
    linear.weight.grad = None
    linear(values).backward(G)
    assert values.grad is not None and linear.weight.grad is not None
    return values.grad, linear.weight.grad


def test_gradients_are_the_same_again_in_the_same_pass_and_others_in_any_other() -> None:
    backend = backend_of(NVFP4)
    linear = linear_of(backend)
    assert torch.equal(linear(X), GOLDEN["y"].bfloat16()), "the forward is rounded to nearest"
    drawn: list[tuple[Tensor, Tensor]] = []
    torch.manual_seed(1)
    for number in ((0, 1, 1), (0, 1, 2), (0, 2, 1), (1, 1, 1)):
        backend.begin_pass(*number)
        drawn.append(backward(linear))
    for seen, one in enumerate(drawn):
        assert not any(torch.equal(a, b) for other in drawn[:seen] for a, b in zip(one, other, strict=True))
    again = backend_of(NVFP4)  # after a kill, whatever else has drawn numbers since
    torch.manual_seed(2)
    same = linear_of(again)
    again.begin_pass(0, 1, 2)
    assert all(torch.equal(a, b) for a, b in zip(backward(same), drawn[1], strict=True))
    second = linear_of(again)
    assert not torch.equal(backward(second)[0], drawn[1][0]), "a GEMM that is made later draws other numbers"


def held(values: Tensor) -> Tensor:
    """The values, but for what an E4M3 scale, which may be rounded down, has brought beyond 6: that is 6 at random,
    too."""
    _, scale_inv, amax = nvfp4_scaling.quantize(values, (1, 16))
    most = 6 * scale_inv.float().repeat_interleave(16, 1) * (amax / 2688)
    return values.float().clamp(-most, most)


def test_in_the_mean_gradients_are_those_of_the_gradient_itself() -> None:
    """Of n passes the error of the mean is that of a pass by the root of n, as no pass is off in the same direction.
    What is rounded to nearest is off by more."""
    backend = backend_of(NVFP4)
    linear = linear_of(backend)
    quantizers, passes = nvfp4_quantizers(no_draw), 25
    w, x = quantizers["weight"].quantize(W).columns, quantizers["input"].quantize(X).columns
    assert w and x
    by_token, by_output = held(G), held(nvfp4_scaling.transformed(G.t()))
    exact = by_token @ w.summands().t(), by_output @ x.summands().t()
    errors: list[list[Tensor]] = [[], []]
    for number in range(passes):
        backend.begin_pass(number)
        for seen, one, wanted in zip(errors, backward(linear), exact, strict=True):
            seen.append(one.float() - wanted)
    for seen, wanted, nearest in zip(errors, exact, (GOLDEN["dgrad"], GOLDEN["wgrad"]), strict=True):
        of_the_mean, of_a_pass = torch.stack(seen).mean(0).norm(), torch.stack([one.norm() for one in seen]).mean()
        assert of_the_mean < 1.2 * of_a_pass / passes**0.5
        assert of_the_mean < 0.7 * (nearest - wanted).norm()


def test_a_norm_is_rounded_before_it_is_cast() -> None:
    backend = backend_of(NVFP4)
    fused = backend.layer_norm_linear("fused", 64, 96, False, Norm("RMSNorm", 1e-5), None)
    alone = linear_of(backend)
    alone.load_state_dict({"weight": fused.weight})
    assert torch.equal(fused(X), alone(fused.gemm_input(X).bfloat16()))


@pytest.mark.parametrize("counts", [(40, 0, 3, 21)])
def test_experts_are_linears_of_their_own_tokens(counts: Sequence[int]) -> None:
    """As if each had its tokens filled with zeros to whole groups, as TE fills them to 128."""
    backend = backend_of(NVFP4)
    grouped = backend.grouped_linear("experts", len(counts), 64, 96, False, None)
    values = X.clone().requires_grad_()
    out = grouped(values, counts)
    out.backward(G)
    start = 0
    for expert, count in enumerate(counts):
        weight, here = grouped.get_parameter(f"weight{expert}"), slice(start, start + count)
        start += count
        assert weight.grad is not None and bool(weight.grad.any()) == bool(count)
        if count:
            alone = backend.linear("alone", 64, 96, False)
            alone.load_state_dict({"weight": weight})
            filled = torch.nn.functional.pad(X[here], (0, 0, 0, -count % 128))
            assert torch.equal(out[here], alone(filled)[:count])
            exact = G[here].float().t() @ X[here].float()
            assert (weight.grad.float() - exact).norm() < 0.3 * exact.norm()


def test_sizes_are_multiples_of_32() -> None:
    """A row of 4-bit codes has to end on 16 bytes, on either side of each of the three products (megatron-core,
    fp4_utils.py, get_fp4_align_size)."""
    backend = backend_of(NVFP4)
    with pytest.raises(PrecisionError, match=r"80 by 48: NVFP4 GEMMs need multiples of 32.*linear"):
        backend.linear("linear", 48, 80, False)
    with pytest.raises(PrecisionError, match="a batch of tokens of 16: NVFP4 GEMMs"):
        linear_of(backend)(X[:16])
