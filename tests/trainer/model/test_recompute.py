"""Layers that are computed once more in the backward, against layers that keep their activations: to the last bit."""

import pytest
import torch
from gpt_models import VOCABULARY, same_state, transformers_model
from soaking import in_soak

from precisionctl.architectures.families import from_hf_config
from precisionctl.fp8.state import DelayedScaling
from precisionctl.precision import PRESETS, Precision
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.model import gpt as trainer
from precisionctl.trainer.model.gpt import GPT

DELAYED = Precision(fp8=True, delayed=DelayedScaling(amax_history_len=4))
LAYERS, PASSES = 2, 3


def made(precision: Precision, family: str, *, recompute: bool) -> GPT:
    torch.manual_seed(0)
    return GPT(from_hf_config(transformers_model(family).config.to_dict()), precision, recompute=recompute)


def trained(model: GPT, real: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Logits of some steps of plain gradient descent, and the parameters after them."""
    torch.manual_seed(1)
    seen = []
    for _ in range(PASSES):
        logits = model(torch.randint(VOCABULARY, (2, 16)), real)
        logits.float().square().mean().backward()
        seen.append(logits.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= parameter.grad
                parameter.grad = None
    return [*seen, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("family", ["mixtral", *in_soak("llama-2")])
@pytest.mark.parametrize(
    "precision",
    # the others keep nothing between two computations, as BF16
    [PRESETS["bf16"], DELAYED, *in_soak(PRESETS["fp8-block"], PRESETS["fp8-current"], PRESETS["mxfp8"])],
    ids=["bf16", "delayed", "block", "current", "mxfp8"],
)
def test_every_bit_is_the_same_and_each_layer_is_computed_twice(
    precision: Precision, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping, again = (made(precision, family, recompute=recompute) for recompute in (False, True))
    expected = trained(keeping)
    calls = []
    through = trainer.Layer.through
    monkeypatch.setattr(trainer.Layer, "through", lambda *what: calls.append(1) or through(*what))
    assert all(map(torch.equal, trained(again), expected))
    assert len(calls) == 2 * LAYERS * PASSES
    linears = fp8_linears(again)
    assert bool(linears) == (precision is DELAYED)
    assert all(
        same_state(linear.fp8_state(), linears[name].fp8_state()) for name, linear in fp8_linears(keeping).items()
    )
    with torch.no_grad():
        again(torch.randint(VOCABULARY, (2, 16)))
    assert len(calls) == (2 * PASSES + 1) * LAYERS


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["llama-2", "mixtral"])
def test_a_recorder_sees_each_pass_once(family: str, padded: bool) -> None:
    real = torch.arange(16) < torch.tensor([[16], [9]]) if padded else None
    states = []
    for recompute in (False, True):
        model, recorder = made(PRESETS["bf16"], family, recompute=recompute), Recorder(DELAYED, torch.device("cpu"))
        with model.recorded_by(recorder):
            trained(model, real)
        states.append(recorder.states())
    assert states[0].keys() == states[1].keys() and states[0]
    assert all(same_state(state, states[1][name]) for name, state in states[0].items())
