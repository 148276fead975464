"""The folder of a run: which run it is, its newest iteration, and which iterations are kept.

Each checkpoint is one iteration of a Megatron `torch_dist` directory. `precisionctl/run.json` in it has the step, the
position in the data, and the identity of the run; only iterations with this file are ever removed.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.megatron.keys import RUN_FILE, TRACKER
from precisionctl.checkpoints.run_file import identity_of_run, read_run_file
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.errors import DamagedCheckpoint, OutputError, damage
from precisionctl.fp8 import sidecar
from precisionctl.recipe import MUON_KEYS, GuardSettings, ParallelSettings, Recipe, Tracking, Train, flat, recipe_of
from precisionctl.trainer.measure.json_numbers import nan_for_null, to_json_numbers
from precisionctl.trainer.model.router_balance import Balance
from precisionctl.trainer.optimizer.megatron_schedule import MegatronSchedule
from precisionctl.trainer.stopping import SkippedSteps, Stop
from precisionctl.untrusted.safe_pickle import is_count

_PARTIAL = ".partial"  # the suffix of a directory that Output is building
_REMOVED = ".removed"
_KEYS_NOT_IN_IDENTITY = (
    *(f"parallel.{key.name}" for key in fields(ParallelSettings)),
    "train.recompute",
    "train.memory_check",
    "train.graphs",
    "train.keep",
    "train.async_save",
    "train.max_skipped",
    "train.save_every",
    "train.eval_every",
    "data.path",
    "data.blend",
    "data.held_out",
    "data.cache",
    *(f"guard.{key.name}" for key in fields(GuardSettings)),
    *(f"tracking.{key.name}" for key in fields(Tracking)),
)
"""Recipe keys that are not part of a run's identity, as they change no number of it, or only how sums are rounded.
Instead of `data.path` and `data.blend` the contents of the files are. A guard and the bound on skipped steps change
nothing until they act, and then the user must be able to change them."""


@dataclass(frozen=True)
class Saved:
    """The contents of `run.json`. `identity` is as from `identity`; `guard` is `Guard.saved_state`, if the run has one;
    `schedule` are the fields of the MegatronSchedule that it continues, if it does; `skips` those of SkippedSteps."""

    step: int
    position: int
    identity: Mapping[str, Any]
    guard: Mapping[str, Any] | None = None
    schedule: Mapping[str, Any] | None = None
    skips: Mapping[str, int] = field(default_factory=dict)
    balance: Mapping[str, float] | None = None
    """What keeps the loads of its experts even, as `Balance` has it; None in runs from before there was one."""
    fp8: bool | None = None
    """Whether its last step was computed in FP8; None in runs from before this was noted."""


class Progressing(Protocol):
    """What `run.json` says of a run, whichever engine trains it."""

    step: int
    position: int
    schedule: MegatronSchedule | None
    skipped: SkippedSteps


def saved_run(
    run: Progressing,
    identity: Mapping[str, Any],
    balance: Balance,
    *,
    fp8: bool,
    guard: Mapping[str, Any] | None = None,
) -> Saved:
    """The contents of `run.json` for a run as it is now."""
    schedule = asdict(run.schedule) if run.schedule else None
    return Saved(run.step, run.position, identity, guard, schedule, asdict(run.skipped), asdict(balance), fp8)


def after_step(step: int, train: Train, asked: Stop | None) -> tuple[bool, Stop | None]:
    """Whether a run is saved after a step, and the reason if it ends there before its last one. It is saved where it
    ends, at the last step, and each `train.save_every` th. At the last step it is done, whatever `asked` it to stop."""
    stop = asked if step < train.steps else None
    return stop is not None or step == train.steps or step % train.save_every == 0, stop


def identity(source: Reader, data: str, recipe: Recipe, **start: object) -> dict[str, Any]:
    """Everything that determines a run's numbers, by name: the source (its files' sizes and times, its model), the
    fingerprint of the `data`'s tokens, the recipe key by key, and how it starts. Another value means another run. What
    computes it is no part, as a run may go on elsewhere: machine, backend, libraries."""
    state = [source.path / sidecar.RELATIVE] if source.path else []
    files = [file for file in (*source.files, *state) if file.is_file()]
    stats = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    keys = {key: value for key, value in flat(asdict(recipe)).items() if key not in _KEYS_NOT_IN_IDENTITY}
    keys |= flat({"model": asdict(source.model)})
    if not recipe.optimizer.by_muon:  # which alone heeds its settings; and runs from before it have none
        for key in MUON_KEYS:
            del keys[f"optimizer.{key}"]
    if recipe.schedule.kind == "constant" and not recipe.precision.schedule:
        del keys["train.steps"]  # no learning rate and no precision depends on it, so such a run may be extended
    return {"source": hashlib.sha256(json.dumps(stats).encode()).hexdigest(), "data": data, **start, **keys}


def check_place(out: Path, checkpoint: Path) -> None:
    """Raise OutputError if a run's folder is a file, contains the checkpoint that it starts from, or is in it."""
    if out.exists() and not out.is_dir():
        raise OutputError("--out must be a folder, and this is a file", where=out, do="Choose another --out.")
    if out.resolve() in (checkpoint.resolve(), *checkpoint.resolve().parents):
        raise OutputError(
            "--out is where the checkpoint itself is, and a source is never written to",
            where=out,
            do="Choose another --out. To go on with a run, give the checkpoint that it was started from.",
        )
    if checkpoint.resolve() in out.resolve().parents:
        what = "--out is in the checkpoint, and a source is never written to"
        raise OutputError(what, where=out, do="Choose another --out.")


def newest(out: Path) -> TorchDistReader | None:
    """The newest iteration in a run's folder, or None. It is found by name, as a kill may have come before the tracker
    was written.

    Raises OutputError if there are checkpoints that no run of ours wrote.
    """
    steps = _iterations(out, "")
    others = [path for path in (*steps.values(), *_iterations(out, _PARTIAL).values()) if not _is_ours(path)]
    if not steps:
        others += [file for name in (TRACKER, "config.json", "*.safetensors") for file in out.glob(name)]
    if others:
        what = f"{others[0].name} is there, and no run of this program wrote it"
        raise OutputError(what, where=out, do="Choose another --out.")
    return TorchDistReader(out, max(steps)) if steps else None


def steps_of(out: Path) -> list[int]:
    """The steps of the iterations in a folder; empty if there is no folder."""
    return [*_iterations(out, "")]


def _iterations(out: Path, suffix: str) -> dict[int, Path]:
    """The directories in a run's folder named `iter_<step><suffix>`, by step."""
    paths = out.iterdir() if out.is_dir() else ()
    matches = ((re.fullmatch(rf"iter_(\d{{7,}}){re.escape(suffix)}", path.name), path) for path in paths)
    return {int(match[1]): path for match, path in matches if match}


def _is_ours(path: Path) -> bool:
    """Whether a run of ours wrote this iteration. One that was killed early may have left a directory without files."""
    begun = path.name.endswith(_PARTIAL) and not any(file.is_file() for file in path.rglob("*"))
    return begun or (path / RUN_FILE).is_file()


def read_saved(iteration: Path) -> Saved | None:
    """The `run.json` in the directory of an iteration; None if another program wrote it. Raises DamagedCheckpoint for
    one that is not what a run writes."""
    if (said := read_run_file(iteration)) is None:
        return None
    file = iteration / RUN_FILE
    try:
        saved = Saved(**said)
        saved = replace(saved, guard=saved.guard and nan_for_null(saved.guard))  # a gap that is NaN is null in JSON
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"not what a run writes: {error}", where=file) from None
    if not (is_count(saved.step) and is_count(saved.position)):
        raise DamagedCheckpoint("not what a run writes: a value of the wrong type or size", where=file)
    if saved.guard is not None and not _is_guard_state(saved.guard):
        raise DamagedCheckpoint("not what a run writes: what its guard keeps is of the wrong type", where=file)
    if saved.schedule is not None:
        with damage("not what a run writes: its schedule", file):
            MegatronSchedule(**saved.schedule)
    with damage("not what a run writes: its skipped steps", file):
        counts = {each.name for each in fields(SkippedSteps)}
        if not (saved.skips.keys() <= counts and all(map(is_count, saved.skips.values()))):
            raise ValueError(f"not the numbers {', '.join(sorted(counts))}")
    if saved.balance is not None:
        with damage("not what a run writes: what balances its experts", file):
            Balance(**saved.balance)
    if "data" not in saved.identity:
        raise DamagedCheckpoint("not what a run writes: it does not say on which data", where=file)
    return saved


def saved_of(source: Reader) -> Saved | None:
    """The `run.json` of a checkpoint; None if another program wrote it. Raises as `read_saved`."""
    return read_saved(source.path) if isinstance(source, TorchDistReader) else None


def settings_of(out: Path) -> Mapping[str, Any]:
    """The settings that the run in a folder was started with, by name, from its newest iteration; empty if there is
    none. Raises DamagedCheckpoint as `read_saved`."""
    steps = _iterations(out, "")
    saved = read_saved(steps[max(steps)]) if steps else None
    return {} if saved is None else saved.identity


def recipe_of_run(reader: Reader) -> Recipe | None:
    """A recipe with the precision and optimizer sections of the run of ours that wrote a checkpoint; None if another
    program wrote it. Raises DamagedCheckpoint and RecipeError for a `run.json` that makes no sense."""
    if (said := identity_of_run(reader)) is None:
        return None
    keys = {key: value for key, value in said.items() if key.startswith(("precision.", "optimizer."))}
    return recipe_of(keys, (reader.path or Path()) / RUN_FILE)


def _is_guard_state(guard: object) -> bool:
    """Whether a value from a file has the types of `Guard.saved_state`."""
    match guard:
        case {"gaps": list(gaps), "bf16_until": int(), **more} if more.keys() <= {"recent", "switched"}:
            recent, switched = more.get("recent", []), more.get("switched", 0)
            return (
                isinstance(recent, list)
                and type(switched) is int
                and all(isinstance(number, float) for number in gaps + recent)
            )
    return False


def differing_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names of the settings in which two runs differ."""
    found, wanted = (json.loads(to_json_numbers(each)) for each in (one, other))
    return sorted(key for key in {**found, **wanted} if found.get(key) != wanted.get(key))


def check_same(saved: Saved, wanted: Mapping[str, Any], out: Path) -> None:
    """Raise OutputError, naming what differs, if the run in `out` has another identity than `wanted`."""
    if differing := differing_settings(saved.identity, wanted):
        do = "Choose another --out, or give the checkpoint, data and settings that it was started with."
        if differing == ["train.steps"]:
            do = f"To train on, give {out} as the checkpoint, and another --out."
        elif differing == ["ranks"]:
            do = "Continue it with as many ranks as it was begun with, or choose another --out."
        raise OutputError(f"another run is there: it differs in {', '.join(differing)}", where=out, do=do)


def read_same(newest: TorchDistReader, wanted: Mapping[str, Any], out: Path) -> Saved:
    """The `run.json` of the iteration that `newest` has found in `out`. Raises as `read_saved` and `check_same`."""
    saved = read_saved(newest.path)
    assert saved is not None, "`newest` returns only iterations that a run of ours wrote"
    check_same(saved, wanted, out)
    return saved


def sign(partial: Path, saved: Saved) -> None:
    """Write `run.json` into a new iteration, before anything else, as only iterations with it may be pruned."""
    (partial / RUN_FILE).parent.mkdir()
    (partial / RUN_FILE).write_text(to_json_numbers(asdict(saved), indent=1))


def prune(out: Path, step: int, keep: int) -> None:
    """Remove iterations older than `step` except the newest `keep - 1`, and what kills left of unfinished ones. They
    are renamed first, so that a half-removed iteration does not look complete."""
    older = {number: path for number, path in _iterations(out, "").items() if number < step and _is_ours(path)}
    for number in sorted(older, reverse=True)[keep - 1 :]:
        older[number].rename(older[number].with_name(older[number].name + _REMOVED))
    partial = [path for path in _iterations(out, _PARTIAL).values() if _is_ours(path)]
    for left in (*_iterations(out, _REMOVED).values(), *partial):
        shutil.rmtree(left)
