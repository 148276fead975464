"""The optimizer's settings of the run that wrote a checkpoint, and where a recipe's differ. A run always takes its
recipe's, so a difference is only said."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.megatron.arguments import read_muon_args
from precisionctl.checkpoints.megatron.directory import of_megatron
from precisionctl.checkpoints.other_trainers.trainer_run import TrainerRun
from precisionctl.errors import RecipeError, shown
from precisionctl.recipe import Optimizer, recipe_of
from precisionctl.trainer.saved.run_folder import saved_of


def other_settings(source: Reader, run: TrainerRun | None, settings: Optimizer) -> str:
    """In words, which settings of the optimizer that trained a checkpoint differ from the recipe's, and how to keep
    them; empty if none does. `run` is as by `others_run`."""
    here, before = asdict(settings), dict[str, Any]()
    if run is not None:  # another program's, as far as its checkpoint says them; Megatron's arguments are unchecked
        before |= zip(("beta1", "beta2"), run.settings.get("betas", ()), strict=False)
        keys = {"eps": "epsilon", "weight_decay": "weight_decay"}
        before |= {ours: run.settings[key] for key, ours in keys.items() if key in run.settings}
        if of_megatron(source):
            before["clip_norm"] = source.args.get("clip_grad")
            before |= read_muon_args(source.args) if run.muon else {}
        if run.muon:  # it trained most weights, so its values are the ones to keep
            keys = {"momentum": "muon_momentum", "weight_decay": "weight_decay"}
            before |= {ours: run.muon[key] for key, ours in keys.items() if key in run.muon}
            if not of_megatron(source):  # whose scheduler has the rates
                before["lr"] = run.muon.get("initial_lr", run.muon["lr"])
    elif saved := saved_of(source):  # those in the `run.json` of a run of ours; unchecked
        of_optimizer = {key: value for key, value in saved.identity.items() if key.startswith("optimizer.")}
        before |= {key.removeprefix("optimizer."): value for key, value in of_optimizer.items()}
        if saved.schedule:  # Megatron's rates, which the run continued
            before.pop("lr", None)
    differing = [
        f"{key} {_said(value)}, here {_said(here[key])} ({_advice(key, value)})"
        for key, value in before.items()
        if key in here and isinstance(value, bool | int | float | str) and value != here[key]
    ]
    return ", ".join([*differing, *(_of_two(run) if run else ())])


def _of_two(run: TrainerRun) -> Iterator[str]:
    """In words, which settings Muon and AdamW had each for itself. A recipe has one for both."""
    rate = "initial_lr" if "initial_lr" in run.muon and "initial_lr" in run.settings else "lr"
    for key in (rate, "weight_decay"):
        values = [one.get(key) for one in (run.muon, run.settings)]
        if None not in values and values[0] != values[1]:
            yield f"{key} {values[0]:g} by Muon and {values[1]:g} by AdamW, and one value is for both from now on"


def _said(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return _as_set(value) if isinstance(value, bool) else shown(value).strip("'")


def _as_set(value: object) -> str:
    """A value as `--set` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _advice(key: str, value: object) -> str:
    """How to keep a setting, if the recipe has such a value."""
    try:
        recipe_of({f"optimizer.{key}": value}, Path())
    except RecipeError:
        return "no --set keeps it"
    return f"--set optimizer.{key}={_as_set(value)} keeps it"
