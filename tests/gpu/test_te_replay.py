"""Fifty steps of a small GPT on Transformer Engine: state from its own recorded amaxes, and the free-running gap."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from te_pairs import assert_same, gpts, train_step
from torch import Tensor

from precisionctl.fp8 import delayed_scaling
from precisionctl.fp8.extra_state import decode_payload
from precisionctl.fp8.extra_state_writer import encode_payload
from precisionctl.fp8.state import DelayedScaling, Fp8State
from precisionctl.precision import PRESETS, Precision
from precisionctl.recipe import Optimizer
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.optimizer.adamw import MasterAdamW

STEPS = 50
RECIPES = {
    "max": DelayedScaling(amax_history_len=16),
    "most recent, margin 1": DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent", margin=1),
}
SETTINGS = Optimizer(lr=2e-4)  # at ten times that the losses of two equal runs part, by roundings alone


def batches() -> Iterator[Tensor]:
    """Tokens that can be learnt: each is the last one and one of two numbers more."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        start = torch.randint(500, (2, 1), generator=generator)
        steps = torch.randint(1, 3, (2, 128), generator=generator) * 7
        yield ((start + steps.cumsum(1)) % 500).to("cuda")


def update(model: GPT, optimizer: MasterAdamW, tokens: Tensor) -> float:
    value = train_step(model, tokens)
    optimizer.collect()
    optimizer.clip()
    optimizer.step(SETTINGS.lr)
    return float(value)


def states(model: GPT) -> dict[str, Fp8State]:
    return {name: state for name, linear in fp8_linears(model).items() if (state := linear.fp8_state())}


def replayed(before: Fp8State, after: Fp8State, recipe: DelayedScaling) -> Fp8State:
    """What the arithmetic here makes of the amaxes that TE recorded: the newest rows."""
    roles = {}
    for role, part in before.roles.items():
        history = part.amax_history.clone()
        history[0] = after.roles[role].amax_history[-1] if role in ("input", "weight", "grad_output") else 0
        roles[role] = delayed_scaling.update_delayed(replace(part, amax_history=history), recipe.dtype(role), recipe)
    return Fp8State(roles)


@pytest.mark.parametrize("name", RECIPES)
def test_replayed_amaxes_give_te_s_scales_histories_and_extra_state_to_the_bit(name: str) -> None:
    import transformer_engine.pytorch as te

    recipe = RECIPES[name]
    model, _ = gpts(Precision(fp8=True, delayed=recipe))
    optimizer = MasterAdamW(model, SETTINGS)
    expected, first = states(model), states(model)
    for tokens in batches():
        update(model, optimizer, tokens)
        found = states(model)
        for module, state in found.items():
            expected[module] = replayed(expected[module], state, recipe)
            assert_same(state, expected[module])
    for module, linear in fp8_linears(model).items():
        base = next(kind for kind in (te.LayerNormLinear, te.Linear) if isinstance(linear, kind))
        theirs = decode_payload(base.get_extra_state(linear).numpy().tobytes(), module)
        ours = decode_payload(encode_payload(expected[module], recipe), module)
        assert theirs is not None and ours is not None
        assert theirs[0] == ours[0] == recipe
        assert_same(theirs[1], ours[1])
        assert not torch.equal(expected[module].roles["input"].scale, first[module].roles["input"].scale)


def test_losses_of_both_backends_stay_together_when_both_run_freely(
    record_property: Callable[[str, object], None],
) -> None:
    """The gap is reported; its mean is held to 1 %, the whole project's aim for FP8 against BF16."""
    theirs, ours = gpts(PRESETS["fp8-delayed"])
    optimizers = [MasterAdamW(model, SETTINGS) for model in (theirs, ours)]
    losses = []
    for tokens in batches():
        losses.append([update(model, each, tokens) for model, each in zip((theirs, ours), optimizers, strict=True)])
    gaps = [one / other - 1 for one, other in losses]
    mean, worst = statistics.mean(gaps[-20:]), max(gaps, key=abs)
    record_property("free_running_gap", {"mean_of_last_20": mean, "worst": worst})
    print(f"free-running gap of {STEPS} steps: {mean:+.3%} in the last 20, {worst:+.3%} at worst")
    assert losses[-1][0] < 0.9 * losses[0][0], "it learns"
    assert abs(mean) < 0.01


def test_histories_collected_in_bf16_are_those_that_fp8_training_records() -> None:
    """Of the same weights and batch. What no FP8 GEMM came before, to the bit: the weights, and the input of the first
    linear but for its norm. The rest within what FP8 does to it."""
    precision = Precision(fp8=True, delayed=DelayedScaling(amax_history_len=4))
    model, _ = gpts(precision)
    tokens = next(batches())
    recorder = Recorder(precision, torch.device("cuda"))
    for _ in range(2):  # TE's first pass has scale 1, in which gradients are lost; the recorder's last is compared
        with model.recorded_by(recorder):
            train_step(model, tokens)
    for name, state in recorder.states().items():
        if name in fp8_linears(model):
            fp8_linears(model)[name].set_fp8_state(state)
    train_step(model, tokens)
    collected = recorder.states()
    for name, state in states(model).items():
        for role, tolerance in {"weight": 0.0, "input": 0.1, "grad_output": 0.3}.items():
            theirs, ours = (kept.roles[role].amax_history[-1] for kept in (state, collected[name]))
            torch.testing.assert_close(theirs, ours, rtol=tolerance, atol=0, msg=f"{name} {role} {theirs} {ours}")
    first = "decoder.layers.0.self_attention.linear_qkv"
    theirs, ours = (kept[first].roles["input"].amax_history[-1] for kept in (states(model), collected))
    torch.testing.assert_close(theirs, ours, rtol=2**-20, atol=0)
