"""Weights that Transformer Engine casts once for all passes of an update."""

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from te_pairs import RECIPES, SHAPE, SHAPES, gpts, refused, state_of, train_step
from torch import Tensor

from precisionctl.model.model_shape import ModelShape
from precisionctl.precision import PRESETS, Precision
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.model.gpt import GPT

PASSES = 3
STATELESS = [
    pytest.param(name, marks=refused(PRESETS[name])) for name in ("fp8-current", "fp8-block", "mxfp8", "nvfp4")
]


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[int]]:
    """How often TE's kernel has cast what lies where."""
    import transformer_engine_torch as kernels

    counted: Counter[int] = Counter()
    before = kernels.quantize

    def quantize(tensor: Tensor, *how: object) -> object:
        counted[tensor.data_ptr()] += 1
        return before(tensor, *how)

    monkeypatch.setattr(kernels, "quantize", quantize)
    return counted


def update(model: GPT, once: bool) -> list[Tensor]:
    """Losses and gradients of some passes between which no weight changes, and evaluation after them."""
    torch.manual_seed(1)
    tokens = torch.randint(500, (PASSES + 1, 2, 128), device="cuda")
    with model.backend.same_weights() if once else nullcontext():
        made = [train_step(model, tokens[number]) for number in range(PASSES)]
    with torch.no_grad():
        made.append(model(tokens[-1]))
    made += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return made


def in_fp8(model: GPT) -> list[Tensor]:
    """The weights of modules that compute in FP8."""
    modules = [module for module in model.modules() if getattr(module, "in_fp8", False)]
    return [p for module in modules for name, p in module.named_parameters() if name.startswith("weight")]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("shape", [SHAPE, SHAPES["like gpt-oss"]], ids=["dense", "experts"])
@pytest.mark.parametrize("preset", STATELESS)
def test_every_bit_is_the_same_and_each_weight_is_cast_once(
    preset: str, shape: ModelShape, recompute: bool, casts: Counter[int]
) -> None:
    model = GPT(shape, PRESETS[preset], "te", device="cuda", recompute=recompute)
    weights = in_fp8(model)
    for _ in range(2):
        casts.clear()
        each = update(model, once=False)
        assert {casts[weight.data_ptr()] for weight in weights} == {PASSES * (1 + recompute) + 1}
        casts.clear()
        once = update(model, once=True)
        assert {casts[weight.data_ptr()] for weight in weights} == {1 + 1}  # the other one is of the evaluation
        assert all(map(torch.equal, once, each))
        with torch.no_grad():
            torch._foreach_mul_(weights, 0.9)  # in place, as an optimizer does
    assert not any(module._fp8_workspaces for module in model.modules() if hasattr(module, "_fp8_workspaces"))


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_under_delayed_scaling_it_is_what_is_emulated(recompute: bool) -> None:
    """A row of a weight's history for an update, and one for a pass of all else."""
    theirs, ours = gpts(Precision(fp8=True, delayed=RECIPES["max"]))
    for model in (theirs, ours):
        for layer in model.decoder.layers:
            layer.recompute = recompute
        for linear in fp8_linears(model).values():
            linear.set_fp8_state(state_of(8))
        update(model, once=True)
    for name, one in fp8_linears(theirs).items():
        state, other = one.fp8_state(), fp8_linears(ours)[name].fp8_state()
        assert state is not None and other is not None
        assert torch.equal(state.roles["weight"].amax_history, other.roles["weight"].amax_history), name
        assert torch.equal(state.roles["weight"].scale, other.roles["weight"].scale), name
        before = state_of(8).roles["weight"].amax_history
        assert torch.equal(state.roles["weight"].amax_history[1:7], before[2:]), name
        assert torch.equal(state.roles["input"].amax_history[1:5], state_of(8).roles["input"].amax_history[4:]), name
