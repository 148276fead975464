"""A run on the disk: each checkpoint is one iteration of a Megatron `torch_dist` directory, committed at once.

Beside the model it holds the optimizer's tensors, the FP8 state, the RNG, the companions, and
`precisionctl/run.json`: the step, the position in the data, and which run this is.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from precisionctl.checkpoints import encodings_file
from precisionctl.checkpoints.base import Companions, Reader
from precisionctl.checkpoints.encodings_file import Coded
from precisionctl.checkpoints.megatron_dist import TorchDistReader
from precisionctl.checkpoints.megatron_dist_writer import TorchDistWriter
from precisionctl.checkpoints.megatron_keys import TRACKER, directory_name, write_tracker
from precisionctl.checkpoints.module import LiveModel, RowsOf
from precisionctl.checkpoints.output import Output, disk_problems
from precisionctl.convert import run as convert
from precisionctl.errors import CheckpointError, DamagedCheckpoint, OutputError, damage
from precisionctl.fp8 import sidecar
from precisionctl.fp8.encoding import Encoding
from precisionctl.fp8.state import Fp8States
from precisionctl.param import TensorSpec
from precisionctl.plan import Plan, make_plan
from precisionctl.recipe import Guard, Recipe
from precisionctl.trainer.backend import fp8_linears
from precisionctl.trainer.loop import Run

RUN_FILE = Path("precisionctl/run.json")
PRODUCER = "precisionctl"
COLLECTED = "collected in BF16 training"
"""The producer of a state that a BF16 run recorded."""

RNG = "precisionctl_rng/shard_0_1"
"""Not Megatron's `rng_state`, which holds what no run of ours draws from."""

_PARTIAL = ".partial"  # what Output builds
_REMOVED = ".removed"
_STATE = "optimizer.state"
_KINDS = ("param", "exp_avg", "exp_avg_sq")
_INDIFFERENT = (
    "parallel.replicate",
    "train.recompute",
    "train.keep",
    "train.save_every",
    "train.eval_every",
    "data.path",
    "data.blend",
    "data.held_out",
    "data.cache",
    *(f"guard.{key.name}" for key in fields(Guard)),
)
"""Recipe keys that change no number of a run; `data.path` and `data.blend` are covered by what is in the files.
A guard changes none until it acts, and then its user must be able to tell it something else."""


@dataclass(frozen=True)
class Saved:
    """What `run.json` says. `identity` is everything that makes a run this one, by name; `guard` what its guard, if
    it has one, keeps in mind."""

    step: int
    position: int
    identity: Mapping[str, Any]
    guard: Mapping[str, Any] | None = None


def identity(source: Reader, data: str, recipe: Recipe, **start: object) -> dict[str, Any]:
    """The source by its files' sizes and times and by its model, the data by their tokens, the recipe key by key,
    and how it starts."""
    state = [source.path / sidecar.RELATIVE] if source.path else []
    files = [file for file in (*source.files, *state) if file.is_file()]
    stats = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    keys = {key: value for key, value in _flat(asdict(recipe)).items() if key not in _INDIFFERENT}
    keys |= _flat({"model": asdict(source.model)})
    if recipe.schedule.kind == "constant" and not recipe.precision.schedule:
        del keys["train.steps"]  # no rate and no precision depends on it: such a run may be made longer
    return {"source": hashlib.sha256(json.dumps(stats).encode()).hexdigest(), "data": data, **start, **keys}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def newest(out: Path) -> TorchDistReader | None:
    """The newest iteration of a run's folder. A kill may have come before the tracker was written.

    Raises OutputError where there are checkpoints that no run of ours wrote.
    """
    steps = _iterations(out, "")
    others = [path for path in (*steps.values(), *_iterations(out, _PARTIAL).values()) if not _is_ours(path)]
    if (out / TRACKER).exists() and not steps:
        others.append(out / TRACKER)
    if others:
        what = f"{others[0].name} is there, and no run of this program wrote it"
        raise OutputError(what, where=out, do="Choose another --out.")
    return TorchDistReader(out, max(steps)) if steps else None


def _iterations(out: Path, suffix: str) -> dict[int, Path]:
    """What is in a run's folder under the names of iterations, with a suffix, by step."""
    matches = ((re.fullmatch(rf"iter_(\d{{7,}}){re.escape(suffix)}", path.name), path) for path in out.iterdir())
    return {int(match[1]): path for match, path in matches if match}


def _is_ours(path: Path) -> bool:
    """Whether a run wrote this; a kill may have left an iteration with no file in it yet."""
    begun = path.name.endswith(_PARTIAL) and not any(file.is_file() for file in path.rglob("*"))
    return begun or (path / RUN_FILE).is_file()


def read_saved(reader: TorchDistReader) -> Saved | None:
    """None where another program wrote the checkpoint. Raises DamagedCheckpoint."""
    file = reader.path / RUN_FILE
    if not file.is_file():
        return None
    try:
        saved = Saved(**json.loads(file.read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"not what a run writes: {error}", where=file) from None
    if not (type(saved.step) is type(saved.position) is int and isinstance(saved.identity, dict)):
        raise DamagedCheckpoint("not what a run writes: a value of the wrong type", where=file)
    if saved.guard is not None and not _is_kept(saved.guard):
        raise DamagedCheckpoint("not what a run writes: what its guard keeps is of the wrong type", where=file)
    if "data" not in saved.identity:
        raise DamagedCheckpoint("not what a run writes: it does not say on which data", where=file)
    return saved


def _is_kept(guard: object) -> bool:
    match guard:
        case {"gaps": list(gaps), "bf16_until": int(), **more} if not more:
            return all(isinstance(gap, float) for gap in gaps)
    return False


def check_same(saved: Saved, wanted: Mapping[str, Any], out: Path) -> None:
    """Raise OutputError, naming what differs, where `out` holds another run."""
    found, plain = saved.identity, json.loads(json.dumps(wanted))
    differing = sorted(key for key in {**found, **plain} if found.get(key) != plain.get(key))
    if differing:
        raise OutputError(
            f"another run is there: it differs in {', '.join(differing)}",
            where=out,
            do="Choose another --out, or give the checkpoint, data and settings that it was started with.",
        )


def load_weights(source: Reader, run: Run) -> None:
    """Fill the masters, in FP32 whatever the source holds, and round them into the model."""
    plan = make_plan(source, "megatron", dtype=torch.float32)
    convert(plan, source, LiveModel(run.model.model, run.optimizer.masters))
    run.optimizer.publish()


def has_optimizer(source: Reader) -> bool:
    """Whether there is optimizer state that `load_optimizer` can read: stored by parameter."""
    return isinstance(source, TorchDistReader) and any(
        name.startswith(f"{_STATE}.exp_avg.") for name in source.optimizer_specs
    )


def load_optimizer(source: TorchDistReader, run: Run) -> None:
    """Fill masters and moments, and the number of updates. Raises CheckpointError where some are missing."""
    plan = make_plan(source, "megatron")
    wanted = _optimizer_plan(plan, _KINDS)
    missing = [name for job in wanted.jobs for name in job.reads if name not in source.optimizer_specs]
    if missing:
        raise CheckpointError(
            f"no `{missing[0]}`: the optimizer's state is not whole", where=source.path, do="Use --load weights."
        )
    convert(wanted, _OptimizerOf(source), LiveModel(run.model.model, _optimizer_tensors(run)))
    run.optimizer.steps = _updates(source)
    run.optimizer.publish()


class _OptimizerOf:
    """The optimizer's tensors of a checkpoint, as a source."""

    encodings: Mapping[str, Encoding] = {}

    def __init__(self, reader: TorchDistReader) -> None:
        self.specs: Mapping[str, TensorSpec] = reader.optimizer_specs
        self.chunks = reader.chunks


def _optimizer_plan(plan: Plan, kinds: Iterable[str]) -> Plan:
    """The plan of a model, for the optimizer's tensors of each kind instead."""
    jobs, targets = [], {}
    for kind in kinds:
        for job in plan.jobs:
            write = f"{_STATE}.{kind}.{job.name}"
            jobs.append(replace(job, name=write, reads=(write,), writes=(write,)))
            targets[write] = replace(plan.targets[job.name], dtype=torch.float32)
    return replace(plan, jobs=tuple(jobs), targets=targets)


def _optimizer_tensors(run: Run) -> dict[str, Tensor]:
    kinds = run.optimizer.tensors.items()
    return {f"{_STATE}.{kind}.{name}": tensor for kind, tensors in kinds for name, tensor in tensors.items()}


def _updates(source: TorchDistReader) -> int:
    """Adam's count of updates, where Megatron's optimizers keep it in the common data."""
    with damage("an optimizer that is not Megatron's", source.path):
        found = source.common.get("optimizer", {})
        inner = found.get("optimizer", found)
        groups = inner.get("param_groups") or [{}]
        step = inner.get("state", {}).get("common_step", groups[0].get("step", source.iteration))
        if step is None:
            raise CheckpointError("nothing says how many updates the optimizer made", where=source.path)
        return int(step)


def load_rng(source: TorchDistReader) -> None:
    """Restore the generators, if a run of ours saved them."""
    if RNG in source.objects:
        state = source.read_object(RNG)
        with damage("states of generators that are none", source.path):
            torch.set_rng_state(state["torch_rng_state"])
            if torch.cuda.is_available():
                torch.cuda.set_rng_state(state["cuda_rng_state"])


def save(
    run: Run,
    out: Path,
    wanted: Mapping[str, Any],
    companions: Companions,
    carried: Fp8States | None,
    coded: Coded | None = None,
) -> None:
    """Commit the run as it stands as a new iteration of `out`, then drop those beyond `train.keep`.

    The state of modules that compute in FP8 goes into `_extra_state`; what is collected, or carried beside it with its
    own date, into the sidecar. Each rank writes its rows where they belong, and the first all else: the bytes are the
    same for any number of them. `coded` is how the source's weights were coded: weights that training leaves as they
    are can be those codes again. Raises DiskProblem; what is under an iteration's name is complete all the same.
    """
    plan, live = _plan(run), LiveModel(run.model.model, {**run.optimizer.parameters, **_optimizer_tensors(run)})
    output = Output(out / directory_name(run.step))
    writer = TorchDistWriter(
        output.partial,
        plan.model,
        plan.targets,
        iteration=run.step,
        companions=companions,
        common=_common(run),
        objects={RNG: _rng()},
    )
    with disk_problems(output):
        if run.world.first:
            output.begin()
            _sign(output.partial, Saved(run.step, run.position, wanted, run.guard.kept if run.guard else None))
            writer.lay_out()
        run.world.meet()
        if run.world.writes:
            mine = RowsOf(writer, live)
            convert(plan, live, mine)
            mine.sync()
        run.world.meet()
        if run.world.first:
            writer.finish(_live(run))
            if beside := _beside(run, carried):
                sidecar.write(output.partial / sidecar.RELATIVE, beside)
            if coded:
                encodings_file.write(output.partial, coded)
            output.commit()
            write_tracker(out, run.step)
            _prune(out, run.step, run.recipe.train.keep)
        run.world.meet()


def _plan(run: Run) -> Plan:
    """From the live model and its optimizer to a checkpoint of both."""
    model = make_plan(LiveModel(run.model.model, _as_stored(run)), "megatron")
    optimizer = _optimizer_plan(model, run.optimizer.tensors)
    return replace(model, jobs=model.jobs + optimizer.jobs, targets={**model.targets, **optimizer.targets})


def _as_stored(run: Run) -> dict[str, Tensor]:
    """The parameters' shapes and dtypes; one that is cut for several ranks is FP32, and stored as one that is not."""
    return {
        name: torch.empty(p.shape, dtype=run.model.backend.dtype if isinstance(p, DTensor) else p.dtype, device="meta")
        for name, p in run.optimizer.parameters.items()
    }


def _sign(partial: Path, saved: Saved) -> None:
    """Say whose this is before there is anything else: only what is ours may be pruned."""
    (partial / RUN_FILE).parent.mkdir()
    (partial / RUN_FILE).write_text(json.dumps(asdict(saved), indent=1))


def _live(run: Run) -> Fp8States | None:
    """State of the modules that compute in FP8; during steps in BF16, as their recorder has it."""
    recorded = run.recorder.states() if run.recorder else {}
    live = {
        name: state
        for name, linear in fp8_linears(run.model).items()
        if (state := recorded.get(name) or linear.fp8_state())
    }
    return Fp8States(run.recipe.precision.delayed, live, producer=PRODUCER, iteration=run.step) if live else None


def _beside(run: Run, carried: Fp8States | None) -> Fp8States | None:
    """What is collected, which has grown out of what was carried; else that."""
    if run.recorder is None or run.recipe.precision.fp8:
        return carried
    collected = Fp8States(run.recipe.precision.delayed, run.recorder.states(), producer=COLLECTED, iteration=run.step)
    return replace(collected, raw=carried.raw, statistics=carried.statistics) if carried else collected


def _common(run: Run) -> dict[str, object]:
    """Optimizer and schedule as Megatron spells them (optimizer.py, optimizer_param_scheduler.py: state_dict)."""
    settings, schedule, train = run.recipe.optimizer, run.recipe.schedule, run.recipe.train
    group = {"lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}
    return {
        "optimizer": {"optimizer": {"state": {"common_step": run.optimizer.steps}, "param_groups": [group]}},
        "opt_param_scheduler": {
            "max_lr": settings.lr,
            "min_lr": settings.lr * schedule.min_ratio,
            "lr_decay_style": {"wsd": "WSD"}.get(schedule.kind, schedule.kind),
            "lr_warmup_steps": schedule.warmup_steps * train.batch_size,
            "lr_decay_steps": train.steps * train.batch_size,
            "num_steps": run.step * train.batch_size,
            "start_wd": settings.weight_decay,
            "end_wd": settings.weight_decay,
            "wd_incr_style": "constant",
            "wd_incr_steps": train.steps * train.batch_size,
        },
    }


def _rng() -> dict[str, Tensor | None]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"torch_rng_state": torch.get_rng_state(), "cuda_rng_state": cuda}


def _prune(out: Path, step: int, keep: int) -> None:
    """Drop iterations before `step`, and what kills left of others. Renamed first: half an iteration must not look
    whole."""
    older = {number: path for number, path in _iterations(out, "").items() if number < step and _is_ours(path)}
    for number in sorted(older, reverse=True)[keep - 1 :]:
        older[number].rename(older[number].with_name(older[number].name + _REMOVED))
    partial = [path for path in _iterations(out, _PARTIAL).values() if _is_ours(path)]
    for left in (*_iterations(out, _REMOVED).values(), *partial):
        shutil.rmtree(left)
