"""Layers that are launched as CUDA graphs, against the same layers launched kernel by kernel: to the last bit."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from te_pairs import RECIPES, SHAPE, SHAPES, assert_same, refused, train_step
from torch import Tensor, nn

from precisionctl.model.model_shape import ModelShape
from precisionctl.precision import PRESETS, Precision
from precisionctl.recipe import Optimizer
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.optimizer.adamw import MasterAdamW

pytestmark = pytest.mark.usefixtures("same_order")

UPDATES, PASSES, ROWS, LENGTH = 3, 2, 2, 128
DELAYED = Precision(fp8=True, delayed=RECIPES["max"])
PRECISIONS = PRESETS | {
    "fp8-delayed": DELAYED,
    "first layer in BF16": replace(DELAYED, num_layers_at_start_in_bf16=1).of_layers(SHAPE.num_layers),
}


def model_of(shape: ModelShape, precision: Precision) -> tuple[GPT, MasterAdamW]:
    torch.manual_seed(0)
    model = GPT(shape, precision, "te", device="cuda")
    return model, MasterAdamW(model, Optimizer(lr=1e-3))


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(500, (ROWS, LENGTH), generator=generator).to("cuda")


def trained(model: GPT, optimizer: MasterAdamW, once: bool) -> list[Tensor]:
    """Losses of some updates, each with a look at tokens that are trained on later, of another shape."""
    seen, coming = [], batches()
    for _ in range(UPDATES):
        with model.backend.same_weights() if once else nullcontext():
            for _ in range(PASSES):
                seen.append(train_step(model, next(coming)))
                optimizer.collect()
        seen.append(optimizer.clip())
        optimizer.step(1e-3)
        with torch.no_grad():
            seen.append(model(next(coming)[:1]))
    return seen


@pytest.mark.parametrize("once", [False, True], ids=["cast in each pass", "cast once"])
@pytest.mark.parametrize(
    "precision", [pytest.param(each, id=name, marks=refused(each)) for name, each in PRECISIONS.items()]
)
@pytest.mark.parametrize("shape", [SHAPE, SHAPES["like Gemma"]], ids=["dense", "like Gemma"])
def test_losses_weights_and_state_are_the_same_to_the_last_bit(
    shape: ModelShape, precision: Precision, once: bool
) -> None:
    plain, plain_optimizer = model_of(shape, precision)
    graphed, graphed_optimizer = model_of(shape, precision)
    for model, optimizer in ((plain, plain_optimizer), (graphed, graphed_optimizer)):
        train_step(model, next(batches()))  # so that state is no fresh one
        optimizer.collect()
        optimizer.step(1e-3)
    before = {name: linear.fp8_state() for name, linear in fp8_linears(graphed).items()}
    graphed.capture(ROWS, LENGTH, same_weights=once)
    for name, linear in fp8_linears(graphed).items():
        assert_same(linear.fp8_state(), before[name])
    expected, found = trained(plain, plain_optimizer, once), trained(graphed, graphed_optimizer, once)
    assert all(map(torch.equal, found, expected))
    for name, parameter in graphed.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name)), name
    for name, linear in fp8_linears(graphed).items():
        assert_same(linear.fp8_state(), fp8_linears(plain)[name].fp8_state())


def test_what_is_not_like_the_captured_batches_is_launched_kernel_by_kernel() -> None:
    model, _ = model_of(SHAPE, DELAYED)
    model.capture(ROWS, LENGTH)
    replay, replayed = model.decoder.replay, []
    assert replay is not None
    model.decoder.replay = replace(replay, graphs=lambda hidden: replayed.append(1) or replay(hidden))
    tokens = next(batches())
    train_step(model, tokens)
    assert len(replayed) == 1
    train_step(model, tokens[:, :64])
    with torch.no_grad():
        model(tokens)
    recorder = Recorder(replace(DELAYED, fp8=True), model.backend.device)
    with model.recorded_by(recorder):
        train_step(model, tokens)
    assert len(replayed) == 1 and recorder.states().keys() >= fp8_linears(model).keys()
    assert isinstance(model.decoder.layers, nn.ModuleList)
