"""Tokens/s, TFLOP/s and memory of a training step: FP8 against BF16, and against what a user would take instead.

Each shape is run with two numbers of layers. What a layer costs is their difference; the whole model is estimated from
it, and said to be. A step is the trainer's own: forward, backward, FP32 gradients, clipping, AdamW on FP32 masters.
Two steps running are timed at once, as a run makes them.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from gpu_sections import plain
from gpu_sections.common import Place, Report, Row, Shape, alone, attempt, batch, recipes, shapes, speed_of, stepper

PLAIN = {"PyTorch BF16": False, "PyTorch _scaled_mm": True}


def measure(place: Place, report: Report) -> None:
    variants = ("bf16", *recipes(place, report), *PLAIN)
    for shape in shapes(place):
        for layers in shape.measured:
            for variant in variants:
                row = {"shape": shape.name, "layers": layers, "variant": variant}
                attempt(report, row, partial(of_variant, shape, layers, variant, place))


def of_variant(shape: Shape, layers: int, variant: str, place: Place) -> Row:
    with alone(place):
        step = partial(_step(shape, layers, variant, place), batch(shape, place))
        found = speed_of(step, shape, layers, place)
        del step
    return found


def _step(shape: Shape, layers: int, variant: str, place: Place) -> Callable[[Tensor], object]:
    if variant in PLAIN:
        return plain.stepper(shape, layers, place, PLAIN[variant])
    return stepper(shape.model(layers), place, variant)
