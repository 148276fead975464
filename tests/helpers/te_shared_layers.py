"""Tensor ranks on Transformer Engine's own Python (`te_on_cpu`), for peers/test_te_on_cpu.py.

`python te_shared_layers.py FILE` writes how far they are from one process in FP32 (`shared_layers.py`), and in FP8 from
tensor ranks that are emulated; and how far data ranks are from one process in FP8.
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
from shared_layers import SIZES, alone, by_data_ranks, by_ranks, in_fp8, source_of, states_of
from torch import Tensor

from precisionctl.fp8.state import IN_USE
from precisionctl.trainer.backends.choose import BackendName
from precisionctl.trainer.parallel.world import World, _meshes, local, together

BACKENDS: tuple[BackendName, ...] = ("emulated", "te")
FAMILIES = ("llama-3", "llama-all-biases", "gemma2", "gpt2", "gpt-oss", "deepseek-v3")


def both_in_fp8(how: str, preset: str) -> dict[str, Any]:
    """How far TE's ranks are from emulated ones."""
    source, (count, sizes) = source_of("mixtral" if "experts" in how else "llama-3"), SIZES[how]
    with together() as ranks:
        dist.init_process_group("gloo", store=ranks.store, rank=ranks.rank, world_size=ranks.count)
        world = World(ranks, *_meshes("cpu", count, sizes), sequence=sizes.sequence)
        ours, theirs = (in_fp8(backend, source, world, preset) for backend in BACKENDS)
        dist.destroy_process_group()
    apart = {
        name: float((local(theirs[2].gradients[name]) - local(gradient)).norm() / local(gradient).norm())
        for name, gradient in ours[2].gradients.items()
    }
    states = states_of(theirs[1])
    amaxes = {
        f"{name} {role}": _apart(state.roles[role].amax_history, states[name].roles[role].amax_history)
        for name, state in states_of(ours[1]).items()
        for role in IN_USE
    }
    return {"losses": [ours[0], theirs[0]], "gradients": apart, "amaxes": amaxes}


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest share by which an amax is another one."""
    assert torch.equal(ours != 0, theirs != 0)
    return float((ours - theirs).div(ours.clamp(min=1e-30)).abs().amax())


def main(file: Path) -> None:
    expected = {family: alone(family) for family in (*FAMILIES, "mixtral")}
    by_two = [(how, family) for how in ("tensor", "sequence") for family in FAMILIES]
    by_four = [("experts", "mixtral"), ("experts and sequence", "gpt-oss"), ("experts in copies", "deepseek-v3")]

    def told_by(count: int, job: Callable[[], Any]) -> list[Any]:
        def on_te(rank: int) -> Any:
            te_on_cpu.install()
            from precisionctl.trainer.backends.te_backend import TransformerEngineBackend

            TransformerEngineBackend.attention = lambda *_: None  # type: ignore[method-assign]  # PyTorch's, as in ours
            return job()

        return [answer for _, answer in fork(count, on_te)]

    told: dict[str, Any] = {"whole": told_by(2, lambda: by_ranks(by_two, expected, "te"))}
    told["whole"] += told_by(4, lambda: by_ranks(by_four, expected, "te"))
    for how in ("tensor", "sequence", "experts and sequence"):
        for preset in ("fp8-delayed", "fp8-current"):
            told[f"{how} {preset}"] = told_by(SIZES[how][0], partial(both_in_fp8, how, preset))
    told["data"] = told_by(2, lambda: by_data_ranks(source_of("llama-3"), "te"))
    file.write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
