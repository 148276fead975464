"""What else there is for FP8 training in PyTorch, at the same layer shapes and in one process with ours: torchao's
float8 training, which wants torch.compile, and plain PyTorch in BF16, compiled and not.

torchao is taken where it can be imported, and its absence is told. Layers are compiled one by one, which is once for
all of them; the seconds of the first step say what that takes.
"""

import dataclasses
import importlib.util
import time
from collections.abc import Callable
from functools import partial

from torch import Tensor

from gpu_sections import plain
from gpu_sections.common import Place, Report, Row, Shape, alone, attempt, batch, shapes, speed_of, stepper, wait

OURS = ("bf16", "fp8-delayed")
PLAIN = {"PyTorch BF16": False, "PyTorch BF16, compiled": True}
TORCHAO = {
    "torchao tensorwise, compiled": ("tensorwise", True),
    "torchao rowwise, compiled": ("rowwise", True),
    "torchao tensorwise": ("tensorwise", False),
}


def measure(place: Place, report: Report) -> None:
    shape = shapes(place)[0]
    has_torchao = importlib.util.find_spec("torchao") is not None
    for name in (*OURS, *PLAIN, *(TORCHAO if has_torchao else ())):
        row = {"shape": shape.name, "layers": shape.measured[1], "variant": name}
        attempt(report, row, partial(of_peer, shape, name, place))
    if not has_torchao:
        report({"shape": shape.name, "absent": "torchao"})


def of_peer(shape: Shape, name: str, place: Place) -> Row:
    layers = shape.measured[1]
    with alone(place):
        step = partial(_step(shape, layers, name, place), batch(shape, place))
        start = time.perf_counter()
        step()
        wait(place)
        first = time.perf_counter() - start
        found = {"first_step": first} | speed_of(step, shape, layers, place)
        del step
    return found


def _step(shape: Shape, layers: int, name: str, place: Place) -> Callable[[Tensor], object]:
    if name in OURS:
        return stepper(shape.model(layers), place, name)
    if name in PLAIN:
        return plain.stepper(shape, layers, place, change=partial(compiled, place=place) if PLAIN[name] else None)
    recipe, is_compiled = TORCHAO[name]
    return plain.stepper(shape, layers, place, change=partial(in_float8, recipe, is_compiled, place))


def compiled(model: plain.Llama, place: Place) -> None:
    """On a CPU only traced: a compiler of C++ would take a minute."""
    for layer in model.layers:
        layer.compile(backend="eager" if place.small else "inductor", dynamic=False)


def in_float8(recipe: str, is_compiled: bool, place: Place, model: plain.Llama) -> None:
    """Linears of layers become torchao's; embedding and output layer stay, as ours do."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=place.small)
    convert_to_float8_training(model.layers, config=config)
    changed = sum(type(module).__name__ == "Float8Linear" for module in model.modules())
    if changed != 4 * len(model.layers):
        raise RuntimeError(f"torchao changed {changed} linears of {4 * len(model.layers)}")
    if is_compiled:
        compiled(model, place)
