"""calibrate: compute the FP8 state of a checkpoint that has none, by forward and backward passes over data in BF16.

Nothing is trained. The passes are the first ones that `resume` would make with the same recipe and data (the same rows,
batches and loss), so a run that starts from the result starts like one that warms up. Each pass fills one row of the
histories. State and statistics are written to one file in the sidecar's format.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from signal import Signals
from typing import Literal

import torch

from precisionctl.calibration.progress import Progress
from precisionctl.checkpoints.module import LiveModel
from precisionctl.checkpoints.output import Output, disk_problems
from precisionctl.codes.statistics import AMAX, Statistics
from precisionctl.commands.hints import open_hinted
from precisionctl.conversion.convert import convert
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.dtypes import DType
from precisionctl.errors import OutputError, PrecisionError, RecipeError
from precisionctl.fp8.state import CALIBRATED, Fp8States, Role
from precisionctl.paths import StrPath
from precisionctl.planning.make_plan import make_plan
from precisionctl.recipe import Recipe, load_recipe
from precisionctl.sizes import counted
from precisionctl.tokens.tokenizer import open_tokenizer
from precisionctl.trainer.backends.choose import choose_backend
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.data import Blend, Feed, Rows
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.model.undrawn import Undrawn
from precisionctl.trainer.parallel import shards
from precisionctl.trainer.parallel.shards import ModelShards
from precisionctl.trainer.parallel.world import World, together, world
from precisionctl.trainer.passes import recording_pass
from precisionctl.trainer.saved import run_folder
from precisionctl.trainer.saved.balance import balance_of
from precisionctl.trainer.settings import check_length, tokenized_rows, with_data
from precisionctl.trainer.stopping import agreed_signal, stop_signals

PASSES = 64

SAVE_EVERY = 8
"""Passes between saves of the progress."""

MEASURE_EVERY = 16
"""Statistics are taken in every 16th pass and in the last, as measuring a pass costs as much as four passes."""

OnPass = Callable[[int, int], None]
"""Called with the number of passes made and the number of all passes."""


@dataclass(frozen=True)
class Calibration:
    """The arguments of `calibrate`; paths may be strings. `out` is a file that must not exist yet; without `data` the
    recipe's is used. `recipe` is a bundled name or a TOML file, by default fp8-delayed, and `overrides` are
    `section.key=value`, e.g. `data.sequence_length=256` (tokens of a row). Each of `passes` fills one row of the
    histories. `reference` has the config and tokenizer of a checkpoint that lacks them."""

    checkpoint: Path
    data: StrPath | None
    out: Path
    recipe: str | None = None
    overrides: tuple[str, ...] = ()
    passes: int = PASSES
    backend: Literal["auto", "te", "emulated"] = "auto"
    iteration: int | None = None
    reference: Path | None = None

    def __post_init__(self) -> None:
        for name in ("checkpoint", "out"):
            object.__setattr__(self, name, Path(getattr(self, name)))
        if self.reference is not None:
            object.__setattr__(self, "reference", Path(self.reference))


@dataclass(frozen=True)
class Calibrated:
    """The result: `states` from `passes` passes of `rows` rows of tokens each (docs/scales.md). `signal` stopped it
    early, if any did.
    `on_first_rank` is True on the one rank that reports it."""

    out: Path
    states: Fp8States
    passes: int
    rows: int
    notes: tuple[str, ...]
    signal: Signals | None = None
    on_first_rank: bool = True


def calibrate(calibration: Calibration, on_pass: OnPass = lambda done, total: None) -> Calibrated:
    """Make the passes and write the file.

    After a kill the same call continues, and the file has the same bytes as without the kill. Under torchrun the ranks
    divide the rows of each pass, and the first rank calls `on_pass`.

    Raises RecipeError, DataError, DestinationExists, OutputError (another process is calibrating to this file),
    PrecisionError (a loss that is not finite), and as `open_hinted`. If several ranks fail, one raises the error
    and the others SystemExit.
    """
    with together() as ranks:
        if calibration.passes < 1:
            raise RecipeError(f"passes = {calibration.passes} must be 1 or above")
        recipe = load_recipe(calibration.recipe or "fp8-delayed", calibration.overrides)
        precision = replace(recipe.precision, fp8=True)
        if not precision.keeps_state:
            raise RecipeError(
                f"{precision.scaling} scaling keeps no state to calibrate",
                do="Choose a recipe with precision.scaling=delayed.",
            )
        recipe = with_data(replace(recipe, precision=precision), calibration.data)
        with world(ranks, recipe) as here:
            return _calibrate(calibration, recipe, here, on_pass)


def _calibrate(calibration: Calibration, recipe: Recipe, world: World, on_pass: OnPass) -> Calibrated:
    backend, output = choose_backend(calibration.backend), _output(calibration)
    source = open_hinted(calibration.checkpoint, calibration.iteration, reference=calibration.reference)
    check_length(recipe, source.model, "--sequence-length ")
    # Parameters that FSDP2 shards are FP32, which are rounded when they are gathered
    plan = make_plan(source, "megatron", dtype=DType.bfloat16 if world.count == 1 else DType.float32)
    shards.check(plan.model, recipe.parallel)
    recipe = replace(recipe, precision=recipe.precision.of_layers(source.model.num_layers))
    with open_tokenizer(source.companions, source.path) as tokenizer:
        rows = tokenized_rows(recipe.data, tokenizer, source.model)
    rows = rows.shared_by(recipe.parallel.token_ranks)

    at_once = min(recipe.train.micro_batch_size, recipe.train.batch_size // world.data_count) * world.data_count
    # Rows are not used twice, as they would record the same amaxes again
    passes, notes = min(calibration.passes, max(1, len(rows) // at_once)), [*rows.notes]
    if passes < calibration.passes:
        have = f"the data has {counted(len(rows), 'row')}, {at_once} for a pass"
        notes.append(f"{counted(passes, 'pass', 'passes')} instead of {calibration.passes}: {have}")
    # With several ranks a pass has the rows of all
    shared = {"ranks": world.data_count} if world.data_count > 1 else {}
    identity = run_folder.identity(source, rows.fingerprint, recipe, passes=passes, backend=backend, **shared)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    balance, recompute = balance_of(source, recipe.router), recipe.train.recompute == "layer"
    with Undrawn():  # what it refuses leaves nothing at `output`
        model = GPT(plan.model, recipe.precision, backend, torch.bfloat16, device, world, recompute, balance)
    model.requires_grad_(False)  # of weights: that saves a third of the work and changes nothing recorded

    progress = Progress(output, identity, world)
    with disk_problems(output), progress.locked(), stop_signals() as received:
        recorder, weights = Recorder(recipe.precision, device, world), digest_weights(source)
        if written := progress.finished():
            progress.clear()
            notes.append("it was written before: this command was killed right after")
            return Calibrated(calibration.out, written, passes, at_once, tuple(notes), None, world.first)
        before = progress.load(recorder)
        parameters = dict(model.named_parameters())
        convert(plan.text, source, LiveModel(plan.model, parameters, shards=model.shards.tensors))
        stopped = None
        for done in _record(model, recorder, rows, recipe, range(before, passes)):
            if world.first:
                on_pass(done, passes)
            stopped = agreed_signal(world, received) if done < passes else None
            if stopped or (done < passes and done % SAVE_EVERY == 0):
                progress.save(done, _states(recorder, source.iteration, weights, model.shards))
            if stopped:
                break
        states = _states(recorder, source.iteration, weights, model.shards)
        if not stopped:
            progress.finish(states)
    return Calibrated(calibration.out, states, passes, at_once, tuple(notes), stopped, world.first)


def _output(calibration: Calibration) -> Output:
    """The place of the result. Raises DestinationExists if something is there, OutputError if it is a directory or in
    the checkpoint."""
    output, source = Output(calibration.out), calibration.checkpoint.resolve()
    if calibration.out.is_dir():
        raise OutputError("--out is a directory", where=calibration.out, do="Give the name of a new file.")
    if not output.partial.is_dir():  # otherwise the file may be from this calibration, killed right after writing it
        output.check_free()
    if source in (output.path.resolve(), *output.path.resolve().parents):
        raise OutputError(
            "--out is in the checkpoint, and a source is never written to",
            where=calibration.out,
            do="Choose a place outside it. `convert --fp8-state` makes a checkpoint that has the state in it.",
        )
    return output


def _record(model: GPT, recorder: Recorder, rows: Rows | Blend, recipe: Recipe, numbers: range) -> Iterator[int]:
    """Make the passes with these numbers. Yields, after each, how many have been made in all."""
    world = model.backend.world
    feed = Feed(rows, recipe.train, recorder.device, world)
    with model.recorded_by(recorder):
        for number, (batch, targets) in zip(numbers, islice(feed.upcoming(0), numbers.start, None), strict=False):
            recorder.measuring = (number + 1) % MEASURE_EVERY == 0 or number + 1 == numbers.stop
            if not math.isfinite(float(world.sum_over_data_ranks(recording_pass(model, batch, targets)))):
                raise PrecisionError(
                    f"the loss of pass {number + 1} is not a number",
                    do="Is the checkpoint intact? `precisionctl eval` measures its perplexity.",
                )
            if recorder.measuring:  # here, and not where progress is saved, so that a kill changes the order of no sum
                recorder.go_on_from(_merged(recorder, model.shards))
            yield number + 1


def _states(recorder: Recorder, iteration: int | None, weights: str, shards: ModelShards) -> Fp8States:
    """The states that all ranks have recorded, for a model whose weights have the digest `weights`."""
    return Fp8States(
        recorder.precision.delayed,
        recorder.states(),
        producer=CALIBRATED,
        iteration=iteration,
        statistics=_merged(recorder, shards),
        of_weights=weights,
    )


def _merged(recorder: Recorder, shards: ModelShards) -> Mapping[str, Mapping[Role, Statistics]]:
    """The statistics of all ranks, merged. What several ranks have is counted once."""
    world, mine = shards.world, recorder.statistics
    if world.count == 1:
        return mine
    keys = [(module, role) for module, state in sorted(recorder.states().items()) for role in state.roles]
    found = [mine.get(module, {}).get(role, Statistics()) for module, role in keys]
    listed = [
        (one if shards.contributes_to_sum(module, role, module in recorder.scattered) else Statistics()).as_row()
        for one, (module, role) in zip(found, keys, strict=True)
    ]
    numbers = torch.tensor(listed, dtype=torch.float64, device=recorder.device)
    total = world.all_reduce_sum(numbers)
    total[:, AMAX] = world.all_reduce_max(numbers[:, AMAX])
    merged: dict[str, dict[Role, Statistics]] = {}
    for (module, role), row in zip(keys, total.tolist(), strict=True):
        if row[0]:
            merged.setdefault(module, {})[role] = Statistics.from_row(row)
    return merged
