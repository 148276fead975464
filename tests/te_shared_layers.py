"""Tensor ranks on Transformer Engine's own Python (`te_on_cpu`), for peers/test_te_on_cpu.py.

`python te_shared_layers.py FILE` writes how far they are from one process in FP32 (`shared_layers.py`), and in FP8 from
tensor ranks that are emulated.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import te_on_cpu
import torch
import torch.distributed as dist
from forked import fork
from shared_layers import LENGTH, ROWS, SIZES, alone, batch_of, by_ranks, source_of
from torch import Tensor

from precisionctl.checkpoints.module import LiveModel
from precisionctl.conversion import convert
from precisionctl.fp8.state import IN_USE
from precisionctl.planning.make_plan import make_plan
from precisionctl.precision import PRESETS
from precisionctl.recipe import Optimizer
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.backends.choose import BackendName
from precisionctl.trainer.loop import backward
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.optimizer.adamw import MasterAdamW
from precisionctl.trainer.parallel.world import World, _meshes, local, together

FAMILIES = ("llama-3", "llama-all-biases", "gemma2", "gpt2", "gpt-oss", "deepseek-v3")


def in_fp8(backend: BackendName, source: Any, world: World, preset: str) -> dict[str, Any]:
    """Losses of two passes, gradients, and histories by module and role."""
    model = GPT(source.model, PRESETS[preset], backend, world=world)
    optimizer = MasterAdamW(model, Optimizer(clip_norm=0), model.shards)
    live = LiveModel(source.model, optimizer.masters, shards=model.shards.tensors)
    convert.run(make_plan(source, "megatron"), source, live)
    each = ROWS // world.data_count
    batch = batch_of(range(world.data_rank * each, (world.data_rank + 1) * each), packed=False)
    losses = [float(backward(model, batch, ROWS * (LENGTH - 3))) for _ in range(2)]
    optimizer.collect()
    optimizer.reduce(world)
    states = {name: state for name, linear in fp8_linears(model).items() if (state := linear.fp8_state())}
    return {"losses": losses, "gradients": optimizer.gradients, "states": states}


def both_in_fp8(how: str, preset: str) -> dict[str, Any]:
    """How far TE's ranks are from emulated ones."""
    source, (count, sizes) = source_of("mixtral" if "experts" in how else "llama-3"), SIZES[how]
    with together() as ranks:
        dist.init_process_group("gloo", store=ranks.store, rank=ranks.rank, world_size=ranks.count)
        world = World(ranks, *_meshes("cpu", count, sizes), sequence=sizes.sequence)
        ours, theirs = (in_fp8(backend, source, world, preset) for backend in ("emulated", "te"))
        dist.destroy_process_group()
    apart = {
        name: float((local(theirs["gradients"][name]) - local(gradient)).norm() / local(gradient).norm())
        for name, gradient in ours["gradients"].items()
    }
    amaxes = {
        f"{name} {role}": _apart(state.roles[role].amax_history, theirs["states"][name].roles[role].amax_history)
        for name, state in ours["states"].items()
        for role in IN_USE
    }
    return {"losses": [ours["losses"], theirs["losses"]], "gradients": apart, "amaxes": amaxes}


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest share by which an amax is another one. Row 0 is that of the next pass, for which TE keeps the amax of
    weights that FSDP2 lets it cast anew in the backward."""
    ours, theirs = ours[..., 1:], theirs[..., 1:]
    assert torch.equal(ours != 0, theirs != 0)
    return float((ours - theirs).div(ours.clamp(min=1e-30)).abs().amax())


def main(file: Path) -> None:
    expected = {family: alone(family) for family in (*FAMILIES, "mixtral")}
    by_two = [(how, family) for how in ("tensor", "sequence") for family in FAMILIES]
    by_four = [("experts", "mixtral"), ("experts and sequence", "gpt-oss"), ("experts in copies", "deepseek-v3")]

    def told_by(count: int, job: Callable[[], Any]) -> list[Any]:
        def on_te(rank: int) -> Any:
            te_on_cpu.install()
            return job()

        return [answer for _, answer in fork(count, on_te)]

    told: dict[str, Any] = {"whole": told_by(2, lambda: by_ranks(by_two, expected, "te"))}
    told["whole"] += told_by(4, lambda: by_ranks(by_four, expected, "te"))
    for how in ("tensor", "sequence", "experts and sequence"):
        for preset in ("fp8-delayed", "fp8-current"):
            told[f"{how} {preset}"] = told_by(SIZES[how][0], partial(both_in_fp8, how, preset))
    file.write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
