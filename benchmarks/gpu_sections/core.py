"""An update as `resume --engine megatron-core` makes it, on Transformer Engine, in one process with ours at the same
layer shapes. One rank: what ranks exchange wants several GPUs, and so does context parallelism.

megatron-core is taken where it can be imported, and its absence is told.
"""

import importlib.util
import time
from functools import partial

import torch

from gpu_sections.common import Place, Report, Row, Shape, alone, attempt, batch, recipe_of, shapes, speed_of, wait
from gpu_sections.peers import OURS, of_peer
from precisionctl.conversion.ranks import Ranks
from precisionctl.trainer.data.rows import EqualRows, Rows
from precisionctl.trainer.model.router_balance import Balance

CORE = {"Megatron-Core BF16": "bf16", "Megatron-Core fp8-delayed": "fp8-delayed"}


def measure(place: Place, report: Report) -> None:
    shape = shapes(place)[0]
    row = {"shape": shape.name, "layers": shape.measured[1]}
    if importlib.util.find_spec("megatron") is None:
        report({"shape": shape.name, "absent": "megatron-core"})
        return
    for name in OURS:
        attempt(report, row | {"variant": name}, partial(of_peer, shape, name, place))
    for name, preset in CORE.items():
        if place.backend == "te" or preset == "bf16":  # FP8 in Megatron-Core is Transformer Engine's
            attempt(report, row | {"variant": name}, partial(of_core, shape, preset, place))


def of_core(shape: Shape, preset: str, place: Place) -> Row:
    from precisionctl.mcore.core_model import make_config
    from precisionctl.mcore.core_run import CoreRun, core_world
    from precisionctl.mcore.stand_ins import stand_ins

    layers = shape.measured[1]
    recipe = recipe_of(shape, preset)
    tokens = batch(shape, place)[:, 1:].flatten().cpu().numpy()
    rows = Rows(tokens, None, EqualRows(shape.rows, shape.length), padding=0, largest=shape.vocab - 1, digest="")
    with alone(place), stand_ins(), core_world(Ranks(), recipe) as world:
        te, model = place.backend == "te", shape.model(layers)
        config = make_config(model, recipe, Balance(), te=te, dtype=torch.bfloat16, equal_rows=rows.has_equal_rows)
        run = CoreRun(recipe, model, rows, world, None, config, te=te)
        start = time.perf_counter()
        run.update()
        wait(place)
        found = {"first_step": time.perf_counter() - start} | speed_of(run.update, shape, layers, place)
        del run
    return found
