"""Runs of several ranks, for test_distributed.py: forked from this one process, which has imported torch already.

`python many_ranks.py FOLDER` makes them in FOLDER, those for tests marked `soak` too if a word `soak` follows, and ends
with what each step and each rank said in `told.json`.
"""

import io
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from forked import answers, die
from training import SMALL, make_source, make_text, settings

from precisionctl.calibration.calibrate import Calibration, calibrate
from precisionctl.cli import main
from precisionctl.errors import DiskProblem
from precisionctl.trainer import resume as trainer
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.run import Run
from precisionctl.trainer.saved import saving
from precisionctl.trainer.saved.saving import Saver

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
MOE = {"model_type": "mixtral", "num_local_experts": 4}
told: dict[str, dict[str, Any]] = {}


@contextmanager
def at_step(step: int, what: Callable[[], object], rank: int, mine: int, broken: int = -1) -> Iterator[None]:
    """One rank does something after an update; its first layer gives out infinities after another one, unless it is
    shown to a recorder."""
    before = trainer.train

    def breaks(run: Run) -> bool:
        return run.step == broken and run.recorder is None

    def train(run: Run, *how: Any) -> Any:
        clip = run.optimizer.clip

        def clipped() -> torch.Tensor:
            if run.step == step and rank == mine:
                what()
            return clip()

        run.optimizer.clip = clipped  # type: ignore[method-assign]
        if rank == mine and broken >= 0:
            mlp = run.model.get_submodule("decoder.layers.0.mlp")
            mlp.register_forward_hook(lambda _, __, out: out * math.inf if breaks(run) else out)
        return before(run, *how)

    trainer.train = train  # type: ignore[assignment]
    yield


def dump(run: Run, name: str, rank: int) -> None:
    states = {module: linear.fp8_state() for module, linear in fp8_linears(run.model).items()}
    plain = {
        (module, role): (part.scale, part.amax_history)
        for module, found in states.items()
        if found
        for role, part in found.roles.items()
    }
    torch.save(plain, FOLDER / f"{name}.{rank}.pt")


def run(
    name: str,
    count: int,
    out: str = "",
    source: str = "source",
    kill: int | None = None,
    broken: int = -1,
    **changes: Any,
) -> None:
    """Each rank trains, and dumps the FP8 state that it starts with and that it ends with."""

    if kill is None and broken < 0 and not out:  # nothing goes back to a checkpoint before the last one
        changes = {"train__save_every": 6} | changes

    def job(rank: int) -> object:
        steps: list[object] = []
        started, save = trainer.start_fp8, Saver.save

        def start(made: Run, *what: Any, **how: Any) -> Any:
            found = started(made, *what, **how)
            dump(made, f"{name}.start", rank)
            return found

        def saved(saver: Saver) -> None:
            dump(saver._run, f"{name}.end", rank)
            save(saver)

        trainer.start_fp8, Saver.save = start, saved  # type: ignore[assignment, method-assign]
        made = settings(FOLDER / source, FOLDER / "text", FOLDER / (out or name), **changes)
        with at_step(kill if kill is not None else -1, die, rank, count - 1, broken):
            trainer.resume(made, lambda _: None, lambda step: steps.append([step.step, step.loss, step.held_out_loss]))
        return steps

    told[name] = answers(count, job)


def record(
    name: str, count: int, passes: int, rows: int, stop: int = 0, out: str = "", source: str = "source", **changes: Any
) -> None:
    """`calibrate` by so many ranks, `rows` in a pass of each; the first one is sent a signal after `stop` passes."""

    def job(rank: int) -> object:
        keys = SMALL | {"train.micro_batch_size": rows, "precision.delayed.amax_history_len": 16}
        keys |= {"data.cache": FOLDER / "tokens"}
        keys |= {key.replace("__", "."): value for key, value in changes.items()}
        overrides = tuple(f"{key}={value}" for key, value in keys.items())
        place = FOLDER / f"{out or name}.safetensors"
        asked = Calibration(FOLDER / source, FOLDER / "text", place, None, overrides, passes, "emulated")
        heard: list[int] = []

        def on_pass(done: int, total: int) -> None:
            heard.append(done)
            if done == stop:
                os.kill(os.getpid(), signal.SIGTERM)

        made = calibrate(asked, on_pass)
        return [made.on_first_rank, made.signal, heard]

    told[name] = answers(count, job)


def run_command(
    name: str, what: Callable[[], object], count: int = 2, more: Sequence[str] = (), **changes: Any
) -> None:
    """The command itself, in which the last rank meets something in its third update; what it shows."""

    def job(rank: int) -> object:
        made = settings(FOLDER / "source", FOLDER / "text", FOLDER / name, train__save_every=1, **changes)
        options = [f"--set={override}" for override in made.overrides]
        words = [
            "resume",
            made.checkpoint,
            "--precision=bf16",
            f"--data={made.data}",
            f"--out={made.out}",
            *options,
            *more,
        ]
        from precisionctl import console

        shown = io.StringIO()
        console._err.file = shown
        code: object = 0
        try:
            with at_step(2, what, rank, count - 1), redirect_stderr(shown):
                main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
        return [code, shown.getvalue()]

    told[name] = answers(count, job)


def fails(*_: object) -> None:
    raise DiskProblem("the disk of the last rank failed")


def saving_it(what: Callable[..., object]) -> Callable[[], None]:
    """Has the coming save meet something."""
    return lambda: setattr(saving.LocalRows, "sync", what)


def signalled() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


BLOCKS = {"precision__scaling": "block", "train__steps": 3}
STILL = {"optimizer__lr": 1e-30, "optimizer__weight_decay": 0, "train__batch_size": 6, "train__steps": 1}
ONCE = {"train__micro_batch_size": 1, "train__steps": 1}
TENSOR = {"parallel__tensor": 2, "parallel__sequence": "true"}


def by_two(source: str, exact: dict[str, Any], fp8: dict[str, Any]) -> None:
    run(f"{source} alone", 1, source=source, **exact)
    run(f"{source} two", 2, source=source, **exact)
    run(f"{source} fp8 two", 2, source=source, **fp8)


def make_runs(exact: dict[str, Any], fp8: dict[str, Any]) -> None:
    run("source fp8 alone", 1, **fp8)
    by_two("source", exact, fp8)
    run("four alone", 1, **ONCE)
    run("four in 2", 4, parallel__replicate=2, **ONCE)
    shared = {**TENSOR, "parallel__expert": 2, "source": "moe"}
    shorter = {**fp8, "train__steps": 2, "train__eval_every": 1, "shadow_every": 1}
    run("moe shorter alone", 1, source="moe", **shorter)
    run(
        "moe tensor",
        4,
        train__async_save=True,
        train__save_every=1,
        **shared,
        **shorter | {"train__micro_batch_size": 2},
    )
    run("four sharing", 4, **shared, **STILL)
    muon = {"optimizer__preset": "muon", "optimizer__muon_extra_scale_factor": 0.2, "optimizer__clip_norm": 0}
    run("muon alone", 1, source="moe", **ONCE, **muon)
    run("muon shared", 4, **shared, **ONCE, **muon)
    record("moe recorded at once", 1, 1, 4, source="moe")
    record("moe recorded at once by tensor", 4, 1, 2, **shared)
    run_command("killed in a save", saving_it(die))


def make_runs_for_soak(exact: dict[str, Any], fp8: dict[str, Any]) -> None:
    run("moe fp8 alone", 1, source="moe", **fp8)
    run("2 of 2-1-4", 2, "2-1-4", kill=3, **fp8)
    run("1 of 2-1-4", 1, "2-1-4", kill=5, **fp8)
    run("4 of 2-1-4", 4, "2-1-4", **fp8)
    for source in ("source", "moe"):
        run(f"{source} guarded alone", 1, source=source, shadow_every=2, **fp8)
        run(f"{source} guarded two", 2, source=source, shadow_every=2, train__recompute="layer", **fp8)
    by_two("moe", exact, fp8)
    for source in ("source", "moe"):
        run(f"{source} fp8 two, recomputed", 2, source=source, train__recompute="layer", **fp8)
    for name, count in (("alone", 1), ("two", 2)):
        run(f"block {name}", count, **BLOCKS, **fp8)
    run("block tensor", 2, parallel__tensor=2, **BLOCKS, **fp8)
    run("three", 3, source="moe", **STILL)
    for copies in (1, 4):
        run(f"four in {copies}", 4, parallel__replicate=copies, **ONCE)
    for copies in (1, 2, 4):
        run(f"guarded, four in {copies}", 4, parallel__replicate=copies, shadow_every=1, **fp8 | ONCE)
    run("source tensor", 2, shadow_every=2, train__recompute="layer", **TENSOR, **fp8)
    run("4 of 4-1-2", 4, "4-1-2", kill=3, **TENSOR, **fp8)
    run("1 of 4-1-2", 1, "4-1-2", kill=5, **fp8)
    run("2 of 4-1-2", 2, "4-1-2", parallel__tensor=2, **fp8)
    record("source recorded at once", 1, 1, 4)
    for source in ("source", "moe"):
        record(f"{source} recorded alone", 1, 6, 2, source=source)
        record(f"{source} recorded by two", 2, 3, 2, source=source)
    record("recorded, stopped", 2, 3, 2, stop=1, out="recorded twice")
    record("recorded, gone on", 2, 3, 2, out="recorded twice")
    sharing = {**TENSOR, "parallel__expert": 2, "source": "moe"}  # in the 16th pass of the 17 statistics are taken
    record("shared", 4, 17, 1, **sharing)
    record("shared, stopped", 4, 17, 1, stop=16, out="shared twice", **sharing)
    record("shared, gone on", 4, 17, 1, out="shared twice", **sharing)
    skipping = {"optimizer__clip_norm": 0, "broken": 2, "train__save_every": 3}
    run("one skips", 1, **skipping)
    run("two skip", 2, **skipping)
    for source in ("source", "moe"):
        record(f"{source} recorded at once by two", 2, 1, 2, source=source)
    record("source recorded at once by tensor", 2, 1, 4, **TENSOR)
    back = {**fp8, "precision__schedule": "[{until = 0.5, fp8 = false}, {}]", "guard__jump_at": 1.0}
    run("going back", 2, broken=4, **back)
    phases = {**fp8, "precision__schedule": "[{until = 0.2}, {until = 0.7, fp8 = false}, {}]"}
    run("phases", 2, **phases)
    run("phases, killed", 2, "phases killed", kill=3, **phases)
    run("phases, gone on", 2, "phases killed", **phases)
    run("two, meanwhile", 2, train__async_save=True, **exact)
    run("two, meanwhile, killed", 2, "two, meanwhile and killed", kill=5, train__async_save=True, **exact)
    run("two, meanwhile, gone on", 2, "two, meanwhile and killed", **exact)
    run_command("killed", die)
    run_command("signalled", signalled)
    run_command("failed", fails)
    run_command("failed in a save", saving_it(fails))
    run_command("out of time", lambda: None, more=["--time-limit=0:00:00"])
    run_command("uneven", die, train__batch_size=5, train__micro_batch_size=1)


def all_runs(*, soak: bool) -> None:
    held_out = make_text(FOLDER / "held_out", seed=1, words=100)
    make_text(FOLDER / "text")
    make_source(FOLDER / "source")
    make_source(FOLDER / "moe", **MOE)
    exact = {
        "train__save_every": 2,
        "optimizer__clip_norm": 0,
        "data__held_out": held_out,
        "collect_amax": True,
        "precision__delayed__amax_history_len": 16,
    }
    fp8 = {
        "precision": "fp8",
        "train__micro_batch_size": 4,
        "optimizer__lr": 0.001,
        "data__held_out": held_out,
    }
    make_runs(exact, fp8)
    if soak:
        make_runs_for_soak(exact, fp8)


if __name__ == "__main__":
    all_runs(soak="soak" in sys.argv[2:])
    (FOLDER / "told.json").write_text(json.dumps(told))
