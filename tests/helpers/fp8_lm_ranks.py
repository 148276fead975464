"""Runs of two ranks with FP8-LM, for test_fp8_lm_ranks.py: `python fp8_lm_ranks.py FOLDER`, as many_ranks.py."""

import json
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from forked import answers, die
from many_ranks import FOLDER, MOE, at_step
from training import make_source, make_text, settings

from precisionctl.trainer import resume as trainer
from precisionctl.trainer.parallel.world import local
from precisionctl.trainer.run import Run

HANDED = {"all_reduce": 0, "all_to_all_single": 1, "all_gather": 1, "all_gather_into_tensor": 1}
"""Collectives, and which of their arguments this rank hands over."""


def counted(name: str, moved: dict[str, int]) -> Callable[..., Any]:
    """A collective that says what was handed to it: bytes by name and dtype."""
    collective, number = getattr(dist, name), HANDED[name]

    def handed(*arguments: Any, **keywords: Any) -> Any:
        tensor = arguments[number] if len(arguments) > number else keywords["tensor"]
        if dist.get_world_size(keywords.get("group")) > 1:
            key = f"{name} {str(tensor.dtype).removeprefix('torch.')}"
            moved[key] = moved.get(key, 0) + tensor.nbytes
        return collective(*arguments, **keywords)

    return handed


def run(name: str, count: int, out: str = "", source: str = "source", kill: int = -1, **changes: Any) -> None:
    """Each rank trains; tells its losses, what it handed to collectives in updates, and what its model has become."""

    def job(rank: int) -> object:
        losses: list[float] = []
        moved: dict[str, int] = {}
        made: list[Run] = []
        for collective in HANDED:
            setattr(dist, collective, counted(collective, moved))
        before = trainer.train

        def train(run: Run, *rest: Any) -> Any:
            made.append(run)
            moved.clear()
            return before(run, *rest)

        trainer.train = train
        with at_step(kill, die, rank, count - 1):
            trainer.resume(
                settings(FOLDER / source, FOLDER / "text", FOLDER / (out or name), **changes),
                lambda _: None,
                lambda step: losses.append(step.loss),
            )
        digest = sha256()
        for parameter in made[0].model.parameters():
            digest.update(local(parameter).contiguous().view(torch.uint8).numpy().tobytes())
        numbers = sum(p.numel() for p in made[0].model.parameters())
        return {"losses": losses, "moved": moved, "model": digest.hexdigest(), "numbers": numbers}

    told[name] = answers(count, job)


told: dict[str, Any] = {}


def all_runs() -> None:
    make_text(FOLDER / "text")
    make_source(FOLDER / "source")
    make_source(FOLDER / "moe", **MOE)
    two = {"parallel__replicate": 2, "train__micro_batch_size": 2}
    lm = {"optimizer__preset": "fp8-lm"}
    for source in ("source", "moe"):
        run(f"{source} alone", 1, source=source, train__micro_batch_size=4, **lm)
        run(f"{source} two", 2, source=source, **two, **lm)
    run("adamw", 2, **two)
    fp8 = {"precision": "fp8", "train__warmup_passes": 1}
    run("fp8", 2, **two, **lm, **fp8)
    run("killed", 2, "gone on", kill=3, **two, **lm)
    run("gone on", 2, **two, **lm)
    run("guarded", 2, shadow_every=2, **two, **lm, **fp8)


if __name__ == "__main__":
    all_runs()
    (FOLDER / "told.json").write_text(json.dumps(told))
