"""Where a step's time goes, at the first shape, in BF16 and under each recipe."""

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from gpu_sections.common import (
    SETTINGS,
    Place,
    Report,
    Row,
    Shape,
    alone,
    attempt,
    batch,
    gpt,
    peak_gb,
    recipes,
    shapes,
    stepper,
    timed,
    train_loss,
    update,
    wait,
)
from precisionctl.precision import PRESETS
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.optimizer.adamw import MasterAdamW

KINDS = {
    "communication": r"nccl",
    "attention": r"flash|fmha|sdpa|attention",
    "optimizer": r"adam|multi_tensor_apply|foreach",
    "GEMM": r"gemm|nvjet|xmma|cublas|cutlass|splitk|aten::(add)?b?mm\b|scaled_mm",
    "norms": r"norm|ln_(fwd|bwd)",
    "casts and transposes": r"transformer_engine|quantize|cast_|transpose|amax|swizzle",
    "our kernels": r"^_(rotate|swiglu|log_sums|logit_gradients)",
    "copies and elementwise": r"elementwise|reduce|cat|copy|memcpy|memset|fill|index|embedding|triton|aten::",
}
"""By names of kernels, and the first that fits: attention's may be CUTLASS's, the optimizer takes a norm, and what is
left of Transformer Engine's own are casts, transposes and the update of scales (its folder `common`)."""

PASSES = 4
"""Micro-batches of an update, of a row each, where weights are cast once or in each."""

Span = tuple[str, float, float]
"""A kernel's name, and when it began and ended, in microseconds."""


def measure(place: Place, report: Report) -> None:
    shape = shapes(place)[0]
    for variant in ("bf16", *recipes(place, report)):
        row = {"shape": shape.name, "layers": shape.measured[1], "variant": variant}
        attempt(report, row | {"profile": True}, partial(profiled, shape, variant, place))
    for variant in ("fp8-delayed", "fp8-block"):
        row = {"shape": shape.name, "layers": shape.measured[1], "variant": variant, "passes": PASSES}
        attempt(report, row, partial(accumulated, shape, variant, place))
    row = {"shape": shape.name, "layers": shape.measured[1], "variant": "bf16", "recorder": True}
    attempt(report, row, partial(recorded, shape, place))
    shape = min(shapes(place), key=lambda one: one.hidden)
    for variant in ("bf16", "fp8-delayed") if place.backend == "te" else ():  # nothing is launched in emulation
        row = {"shape": shape.name, "layers": shape.measured[1], "variant": variant, "graphs": True}
        attempt(report, row, partial(captured, shape, variant, place))


def profiled(shape: Shape, variant: str, place: Place) -> Row:
    """ms of a step by kind of kernel, and `idle`: how much longer one of three steps running takes, unprofiled, than
    kernels run in it. `waited_for` is a step alone, which the GPU begins with nothing to do."""
    with alone(place):
        step = partial(stepper(shape.model(shape.measured[1]), place, variant), batch(shape, place))
        seconds = timed(step, place, repeats=3, warm=2, each=3)["seconds"]
        alone_seconds = timed(step, place, repeats=3, warm=0)["seconds"]
        on = torch.profiler.ProfilerActivity
        activities = [on.CPU] if place.small else [on.CPU, on.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:  # else 2.11 warns
            step()
            wait(place)
        spans = kernels(profile.events(), place)
        del step
    spent = by_kind(spans)
    busy = union(spans) / 1000
    longest = sorted(_by_name(spans).items(), key=lambda one: -one[1])[:25]
    return {
        "ms": spent | {"idle": max(0.0, seconds * 1000 - busy)},
        "seconds": seconds,
        "waited_for": alone_seconds,
        "busy_ms": busy,
        "launches": len(spans),
        "kernels": [(name[:160], taken) for name, taken in longest],
    }


def kernels(events: Iterable[Any], place: Place) -> list[Span]:
    """Those of a GPU, without the ranges that optimizers mark on its timeline. On a CPU operators, each for as long as
    it runs itself."""
    ours = [event for event in events if not event.is_user_annotation]
    if place.small:
        return [(e.name, float(e.time_range.start), float(e.time_range.start + e.self_cpu_time_total)) for e in ours]
    return [
        (e.name, float(e.time_range.start), float(e.time_range.end)) for e in ours if e.device_type == DeviceType.CUDA
    ]


def by_kind(spans: Iterable[Span]) -> dict[str, float]:
    spent = dict.fromkeys([*KINDS, "other"], 0.0)
    for name, start, end in spans:
        spent[kind_of(name)] += (end - start) / 1000
    return spent


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel.lower())), "other")


def _by_name(spans: Iterable[Span]) -> dict[str, float]:
    taken: dict[str, float] = {}
    for name, start, end in spans:
        taken[name] = taken.get(name, 0.0) + (end - start) / 1000
    return taken


def union(spans: Iterable[Span]) -> float:
    """How long at least one of them runs, in microseconds."""
    total, until = 0.0, float("-inf")
    for _, start, end in sorted(spans, key=lambda span: span[1]):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def accumulated(shape: Shape, variant: str, place: Place) -> Row:
    """Seconds of an update from several micro-batches, by how often its weights are cast."""
    found = {}
    with alone(place):
        model = gpt(shape.model(shape.measured[1]), place, variant)
        optimizer, tokens = MasterAdamW(model, SETTINGS), batch(shape, place)[:1]
        for name, around in {"each": nullcontext, "once": model.backend.same_weights}.items():
            step = partial(_accumulate, model, optimizer, tokens, around)
            found[name] = timed(step, place, repeats=4, warm=2, each=2)["seconds"]
        del model, optimizer, step
    return found


def recorded(shape: Shape, place: Place) -> Row:
    """Seconds of a step in BF16, and of one whose amaxes are collected."""
    with alone(place):
        model = gpt(shape.model(shape.measured[1]), place)
        step = partial(update, model, MasterAdamW(model, SETTINGS), batch(shape, place))
        plain = timed(step, place, repeats=3, warm=2, each=2)["seconds"]
        with model.recorded_by(Recorder(PRESETS["fp8-delayed"], place.device)):
            collecting = timed(step, place, repeats=3, warm=2, each=2)["seconds"]
        del model, step
    return {"plain": plain, "collecting": collecting}


def _accumulate(
    model: GPT, optimizer: MasterAdamW, tokens: Tensor, around: Callable[[], AbstractContextManager[None]]
) -> None:
    with around():
        for _ in range(PASSES):
            (train_loss(model, tokens) / PASSES).backward()  # type: ignore[no-untyped-call]
            optimizer.collect()
    optimizer.clip()
    optimizer.step(SETTINGS.lr)


def captured(shape: Shape, variant: str, place: Place) -> Row:
    """Seconds of a step whose layers are launched kernel by kernel, and as CUDA graphs, and memory of both."""
    found: Row = {}
    with alone(place):
        model = gpt(shape.model(shape.measured[1]), place, variant)
        step = partial(update, model, MasterAdamW(model, SETTINGS), batch(shape, place))
        for name in ("kernels", "replayed"):
            if name == "replayed":
                model.capture(shape.rows, shape.length)
            found[name] = timed(step, place, repeats=4, warm=2, each=2)["seconds"]
            found[f"{name}_gb"] = peak_gb(place)
        del model, step
    return found
