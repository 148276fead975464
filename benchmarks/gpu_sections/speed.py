"""Tokens/s, TFLOP/s and memory of a training step: FP8 against BF16, and against what a user would take instead.

Each shape is run with two numbers of layers. What a layer costs is their difference; the whole model is estimated from
it, and said to be. A step is the trainer's own: forward, backward, FP32 gradients, clipping, AdamW on FP32 masters.
"""

import re
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from gpu_sections import plain
from gpu_sections.common import (
    RECIPES,
    SETTINGS,
    Place,
    Report,
    Row,
    Shape,
    alone,
    attempt,
    gpt,
    peak_gb,
    shapes,
    timed,
    train_loss,
    update,
)
from precisionctl.trainer.model import GPT
from precisionctl.trainer.optim import MasterAdamW

PLAIN = {"PyTorch BF16": False, "PyTorch _scaled_mm": True}
VARIANTS = ("bf16", *RECIPES, *PLAIN)
KINDS = {
    "GEMM": r"gemm|cutlass|nvjet|xmma|cublas",
    "attention": r"flash|fmha|sdpa|attention",
    "casts": r"quantize|cast_transpose|transpose|amax|fp8",
    "norms": r"norm",
    "optimizer": r"adam|multi_tensor|foreach",
    "loss": r"softmax|nll|cross_entropy",
}


def measure(place: Place, report: Report) -> None:
    for shape in shapes(place):
        for layers in shape.measured:
            for variant in VARIANTS:
                row = {"shape": shape.name, "layers": layers, "variant": variant}
                attempt(report, row, partial(of_variant, shape, layers, variant, place))
    shape = shapes(place)[0]
    for variant in ("bf16", "fp8-delayed"):
        row = {"shape": shape.name, "layers": shape.measured[1], "variant": variant}
        attempt(report, row | {"without": "host reads"}, partial(without_reads, shape, variant, place))
        attempt(report, row | {"profile": True}, partial(profiled, shape, variant, place))


def of_variant(shape: Shape, layers: int, variant: str, place: Place) -> Row:
    with alone(place):
        step = partial(_step(shape, layers, variant, place), _tokens(shape, place))
        found = timed(step, place, repeats=6, warm=2)
        memory = peak_gb(place)
        del step
    count = shape.rows * shape.length
    return found | {
        "tokens_per_second": count / found["seconds"],
        "tflops": shape.flops(layers) / found["seconds"] / 1e12,
        "memory_gb": memory,
    }


def _step(shape: Shape, layers: int, variant: str, place: Place) -> Callable[[Tensor], object]:
    if variant in PLAIN:
        return plain.stepper(shape, layers, place, PLAIN[variant])
    model = gpt(shape.model(layers), place, variant)
    return partial(update, model, MasterAdamW(model, SETTINGS))


def _tokens(shape: Shape, place: Place) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(shape.vocab, (shape.rows, shape.length + 1), generator=generator).to(place.device)


def _unread_update(model: GPT, optimizer: MasterAdamW, tokens: Tensor) -> None:
    """A step that the host does not wait for."""
    train_loss(model, tokens).backward()
    optimizer.collect()
    nn.utils.clip_grad_norm_(optimizer.masters.values(), SETTINGS.clip_norm)
    optimizer.step(SETTINGS.lr)


def without_reads(shape: Shape, variant: str, place: Place) -> Row:
    """Five steps at a time, so that the host can run ahead."""
    with alone(place):
        model = gpt(shape.model(shape.measured[1]), place, variant)
        optimizer, tokens, found = MasterAdamW(model, SETTINGS), _tokens(shape, place), {}
        for name, step in {"read": update, "unread": _unread_update}.items():
            five = partial(_repeat, partial(step, model, optimizer, tokens), 1 if place.small else 5)
            found[name] = timed(five, place, repeats=4, warm=1)["seconds"]
        del model, optimizer
    return found


def _repeat(function: Callable[[], object], times: int) -> None:
    for _ in range(times):
        function()


def profiled(shape: Shape, variant: str, place: Place) -> Row:
    """Where a step's time goes, by kind of kernel, in ms; `idle` is when no kernel runs."""
    kind = torch.profiler.ProfilerActivity.CPU if place.small else torch.profiler.ProfilerActivity.CUDA
    with alone(place):
        model = gpt(shape.model(shape.measured[1]), place, variant)
        step = partial(update, model, MasterAdamW(model, SETTINGS), _tokens(shape, place))
        seconds = timed(step, place, repeats=3, warm=2)["seconds"]
        with torch.profiler.profile(activities=[kind]) as profile:
            step()
            if not place.small:
                torch.cuda.synchronize()
        del model, step
    spent = dict.fromkeys([*KINDS, "other"], 0.0)
    kernels: list[tuple[str, float]] = []
    for event in profile.key_averages():
        taken = (event.self_cpu_time_total if place.small else event.self_device_time_total) / 1000
        spent[_kind(event.key)] += taken
        kernels.append((event.key[:120], taken))
    idle = max(0.0, seconds * 1000 - sum(spent.values()))
    return {"ms": spent | {"idle": idle}, "kernels": sorted(kernels, key=lambda one: -one[1])[:20], "seconds": seconds}


def _kind(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel.lower())), "other")
