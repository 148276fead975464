"""Tokens/s, TFLOP/s and memory of a training step: FP8 against BF16, and against what a user would take instead.

Each shape is run with two numbers of layers. What a layer costs is their difference; the whole model is estimated from
it, and said to be. A step is the trainer's own: forward, backward, FP32 gradients, clipping, AdamW on FP32 masters.
Two steps running are timed at once, as a run makes them. Beside the memory is what `--dry-run` estimates.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from gpu_sections import plain
from gpu_sections.common import (
    Place,
    Report,
    Row,
    Shape,
    alone,
    attempt,
    batch,
    recipe_of,
    recipes,
    shapes,
    speed_of,
    stepper,
)
from precisionctl.recipe import Data
from precisionctl.trainer.measure.memory import estimate

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
    return found if variant in PLAIN else found | {"estimated_gb": _estimated_gb(shape, layers, variant, place)}


def _step(shape: Shape, layers: int, variant: str, place: Place) -> Callable[[Tensor], object]:
    if variant in PLAIN:
        return plain.stepper(shape, layers, place, PLAIN[variant])
    return stepper(shape.model(layers), place, variant)


def _estimated_gb(shape: Shape, layers: int, preset: str, place: Place) -> float:
    """Without the program itself, which takes nothing from PyTorch's allocator."""
    recipe = replace(recipe_of(shape, preset), data=Data(sequence_length=shape.length))
    found = estimate(shape.model(layers), recipe, place.backend, gpu=not place.small)
    return (found.total - found.process) / 1e9
