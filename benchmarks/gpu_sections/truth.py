"""Emulated against Transformer Engine: how far apart, in numbers. `tests/gpu` holds them to limits.

For each recipe one linear and one LayerNormLinear: output and gradients in decibels. Then fifty steps of a small GPT on
TE: how many of its scales and history rows follow from its recorded amaxes to the bit, how far a run of the emulation
drifts from it, and how far histories collected in BF16 lie from those that TE records.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from gpu_sections.common import SETTINGS, Place, Report, Row, Shape, alone, attempt, gpt, recipes, sqnr, update
from precisionctl.fp8 import delayed_scaling
from precisionctl.fp8.state import IN_USE, DelayedScaling, Fp8State
from precisionctl.precision import PRESETS, Precision
from precisionctl.trainer.backends.base import Backend, Norm, fp8_linears
from precisionctl.trainer.backends.choose import BackendName, make_backend
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.optimizer.adamw import MasterAdamW

GPT_SHAPE = Shape("small GPT", 512, 1408, 8, 4, 4, 512, False, (4, 4), 4, 256)
LR = 2e-4


def measure(place: Place, report: Report) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False  # the emulation multiplies codes in FP32
    presets = recipes(place, report)
    for preset in ("bf16", *presets):
        for kind in ("linear", "layer_norm_linear"):
            row: Row = {"module": kind, "recipe": preset}
            attempt(report, row, partial(of_module, kind, preset, place))
    steps = 5 if place.small else 50
    delayed = Precision(fp8=True, delayed=DelayedScaling(amax_history_len=16))
    attempt(report, {"of": "replay", "steps": steps}, partial(replay, delayed, steps, place))
    for preset in presets:
        row = {"of": "free running", "recipe": preset, "steps": steps}
        attempt(report, row, partial(free_running, preset, steps, place))
    attempt(report, {"of": "collected in BF16"}, partial(collected, delayed, place))


def of_module(kind: str, preset: str, place: Place) -> Row:
    """Least decibels over three steps, by tensor."""
    sizes = (64, 128) if place.small else (4096, 11008)
    tokens = 64 if place.small else 4096
    modules = [_linear(name, kind, preset, sizes, place) for name in (place.backend, "emulated")]
    modules[1][1].load_state_dict(modules[0][1].state_dict())
    least: dict[str, float] = {}
    for _ in range(3):
        values = torch.randn(tokens, sizes[0], device=place.device).bfloat16()
        gradient = torch.randn(tokens, sizes[1], device=place.device).bfloat16() / 1000
        theirs, ours = (_pass(backend, module, values, gradient) for backend, module in modules)
        for name in ours:
            least[name] = min(least.get(name, 1000.0), sqnr(theirs[name], ours[name]))
    return {"decibels": least}


def _linear(
    name: BackendName, kind: str, preset: str, sizes: tuple[int, int], place: Place
) -> tuple[Backend, nn.Module]:
    backend = make_backend(name, PRESETS[preset], torch.bfloat16, place.device)
    module = "decoder.layers.0.mlp.linear_fc1"
    if kind == "linear":
        return backend, backend.linear(module, *sizes, False)
    return backend, backend.layer_norm_linear(module, *sizes, False, Norm("RMSNorm", 1e-5), None)


def _pass(backend: Backend, module: nn.Module, values: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    values = values.detach().requires_grad_()
    module.zero_grad()
    with backend.forward_pass():
        out = module(values)
    out.backward(gradient)
    backend.after_backward()
    assert values.grad is not None
    return {"out": out.detach(), "input": values.grad} | {n: p.grad for n, p in module.named_parameters()}


def _shape(place: Place) -> Shape:
    return replace(GPT_SHAPE, hidden=64, ffn=128, heads=4, groups=2, layers=2, length=32) if place.small else GPT_SHAPE


def _batch(shape: Shape, step: int, place: Place) -> Tensor:
    """Tokens that can be learnt: each is the last one and one of two numbers more."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(shape.vocab, (shape.rows, 1), generator=generator)
    steps = torch.randint(1, 3, (shape.rows, shape.length + 1), generator=generator) * 7
    return ((start + steps.cumsum(1)) % shape.vocab).to(place.device)


def _states(model: GPT) -> dict[str, Fp8State]:
    return {name: state for name, linear in fp8_linears(model).items() if (state := linear.fp8_state())}


def replay(precision: Precision, steps: int, place: Place) -> Row:
    shape, recipe, same, wrong = _shape(place), precision.delayed, 0, 0
    with alone(place):
        model = gpt(shape.model(shape.layers), place, precision)
        optimizer, expected = MasterAdamW(model, SETTINGS), _states(model)
        for step in range(steps):
            update(model, optimizer, _batch(shape, step, place), LR)
            found = _states(model)
            for name, state in found.items():
                for role in IN_USE:
                    history = expected[name].roles[role].amax_history.clone()
                    history[0] = state.roles[role].amax_history[-1]
                    before = replace(expected[name].roles[role], amax_history=history)
                    made = delayed_scaling.update_delayed(before, recipe.dtype(role), recipe)
                    part = state.roles[role]
                    equal = torch.equal(made.scale, part.scale) and torch.equal(made.amax_history, part.amax_history)
                    same, wrong = same + equal, wrong + (not equal)
            expected = found
        del model, optimizer
    return {"equal": same, "different": wrong}


def free_running(preset: str, steps: int, place: Place) -> Row:
    shape = _shape(place)
    with alone(place):
        theirs = gpt(shape.model(shape.layers), place, preset)
        ours = GPT(theirs.model, theirs.precision, "emulated", device=place.device)
        ours.load_state_dict(theirs.state_dict())
        pairs = [(model, MasterAdamW(model, SETTINGS)) for model in (theirs, ours)]
        losses = [[float(update(*pair, _batch(shape, step, place), LR)) for pair in pairs] for step in range(steps)]
        del theirs, ours, pairs
    gaps = [one / other - 1 for one, other in losses]
    return {"losses": losses, "worst": max(gaps, key=abs), "mean_of_last_20": sum(gaps[-20:]) / len(gaps[-20:])}


def collected(precision: Precision, place: Place) -> Row:
    """Amaxes of a batch in BF16 over those that FP8 records of it with the state that BF16 gave: least, median and
    most by role."""
    shape = _shape(place)
    with alone(place):
        model = gpt(shape.model(shape.layers), place, precision)
        optimizer, recorder = MasterAdamW(model, SETTINGS), Recorder(precision, place.device)
        for _ in range(2):
            with model.recorded_by(recorder):
                update(model, optimizer, _batch(shape, 0, place), 0.0)
        states = recorder.states()
        for name, linear in fp8_linears(model).items():
            linear.set_fp8_state(states[name])
        update(model, optimizer, _batch(shape, 0, place), 0.0)
        recorded = _states(model)
        del model, optimizer
    ratios: Row = {}
    for role in IN_USE:
        of_role = [states[n].roles[role].amax_history[-1] / s.roles[role].amax_history[-1] for n, s in recorded.items()]
        values = torch.stack(of_role)
        ratios[role] = [float(values.min()), float(values.median()), float(values.max())]
    return {"collected_over_recorded": ratios}
