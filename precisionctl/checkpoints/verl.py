"""verl's checkpoints of FSDP 1 and 2: the state dicts of each rank, as torch.save writes them (read off verl 0.9.1,
utils/checkpoint/fsdp_checkpoint_manager.py). EasyR1 and SkyRL have the same files.

`model_world_size_W_rank_R.pt` has DTensors, of which a rank has some rows; tensors that are not cut are whole on all
ranks. With replicas of the model (HSDP) the first ranks have one of them together.

`optim_world_size_W_rank_R.pt` is torch.optim's, under numbers: those of the model's parameters, which stand in the
model's file in their order. The moments of a parameter are

- with FSDP 2, cut as the parameter is;
- with FSDP 1, flat: those of a unit (a layer, or everything outside of layers) one after the other, padded, in equal
  parts for the ranks; with `use_orig_params`, each rank has its part of each parameter.

Config and tokenizer are in `huggingface/`; `extra_state_*.pt` has generators and the scheduler's counts.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.base import NO_HINTS, Container, Hints, without_iterations
from precisionctl.checkpoints.other_trainers.flat import EndToEnd, FlatSlice, FlatTensor
from precisionctl.checkpoints.other_trainers.numbered_optimizer import TIED, names_by_number
from precisionctl.checkpoints.other_trainers.saved_states import SavedStates, SavedStatesReader, first_names
from precisionctl.checkpoints.other_trainers.trainer_run import (
    different_counts,
    not_adams,
    number,
    stored_group,
)
from precisionctl.checkpoints.other_trainers.trainer_trees import step_of
from precisionctl.checkpoints.torch_files.dtensors import RankShard
from precisionctl.checkpoints.torch_files.torch_zip import LocatedTensor, contiguous, skeleton
from precisionctl.errors import DROP_OPTIMIZER, CheckpointError, DamagedCheckpoint, damage, shown
from precisionctl.param import MOMENTS, TensorSpec
from precisionctl.sizes import counted
from precisionctl.untrusted.safe_files import check_file

_FILE = re.compile(r"(model|optim)_world_size_(\d{1,6})_rank_(\d{1,6})\.pt")
_LAYER = re.compile(r"(.+\.layers\.\d+)\..+")
_WHAT = "not what verl writes"

RankParts = Sequence[tuple[Path, Any]]
"""For each rank of one copy of the model, the file and the rank's part of a tensor."""


def recognise(path: Path) -> bool:
    """Whether `path` has files of ranks."""
    return path.is_dir() and any(_FILE.fullmatch(one.name) for one in path.glob("model_world_size_*_rank_*.pt"))


class VerlReader(SavedStatesReader):
    """A checkpoint of verl's FSDP workers, such as `global_step_10/actor`. Opening one reads the pickles of all ranks,
    and no tensors.

    Raises DamagedCheckpoint where files are missing or contradict each other, and UnsafePickle.
    """

    container = "verl"

    def __init__(self, path: Path, hints: Hints = NO_HINTS) -> None:
        with damage(_WHAT, path):
            saved = _read(path)
        super().__init__(path, hints, "a checkpoint of verl", path, saved, path / "huggingface")


CONTAINER = Container(recognise, without_iterations(VerlReader), "model_world_size_*_rank_*.pt of verl's FSDP workers")


def _read(directory: Path) -> SavedStates:
    models = _rank_files(directory, "model")
    states: list[tuple[Path, Mapping[str, Any]]] = []
    for rank, path in enumerate(models):
        state = skeleton(path)
        if not isinstance(state, dict) or not all(type(name) is str and name for name in state):
            raise DamagedCheckpoint(_WHAT, where=path)
        _check_rank(state.values(), rank, path)
        states.append((path, state))
    first = states[0][1]
    if any(state.keys() != first.keys() for _, state in states):
        raise DamagedCheckpoint("ranks have tensors of other names", where=directory, do="Is the copy whole?")
    copy = states[: _ranks_of_a_copy([state for _, state in states])]
    if len(states) % len(copy):
        what = f"files of {counted(len(states), 'rank')}, of which {len(copy)} have the model together"
        raise DamagedCheckpoint(what, where=directory, do="Is the copy whole?")
    weights = {name: _joined([(path, state[name]) for path, state in copy], name) for name in first}
    optimizers = _rank_files(directory, "optim")
    if len(optimizers) not in (0, len(models)):
        what = f"the optimizer of {counted(len(optimizers), 'rank')}, the model of {len(models)}"
        raise DamagedCheckpoint(what, where=directory, do="Is the copy whole?")
    files, left = [*models, *optimizers], ("the scheduler's counts",)
    saved = SavedStates(weights, files, step_of(directory), left=left)
    if not optimizers:
        return saved
    # A tensor on the same bytes as an earlier one is tied to it, and a whole tensor among DTensors is a buffer
    cut = {name: one.local for name, one in first.items() if isinstance(one, RankShard)}
    located = {name: one for name, one in (cut or first).items() if isinstance(one, LocatedTensor)}
    parameters = {name: weights[name].spec for name in dict.fromkeys(first_names(located).values())}
    return _with_optimizer(saved, optimizers[: len(copy)], parameters)


def _with_optimizer(saved: SavedStates, files: Sequence[Path], parameters: Mapping[str, TensorSpec]) -> SavedStates:
    """The states with AdamW's, as the ranks of one copy of the model have it; or with a note in words on the optimizer
    that cannot be read."""
    contents = [(path, skeleton(path)) for path in files]
    if not all(isinstance(one, dict) and {"state", "param_groups"} <= one.keys() for _, one in contents):
        return replace(saved, unsupported_state="it is not under numbers, as torch.optim's is")
    groups = [dict(group) for group in contents[0][1]["param_groups"]]
    states = [(path, one["state"]) for path, one in contents]
    for rank, (path, one) in enumerate(states):
        _check_rank((value for state in one.values() for value in state.values()), rank, path)
    if others := not_adams(kind for _, one in states for state in one.values() for kind in state):
        return replace(saved, unsupported_state=others)
    updates = {number(state["step"], path) for path, one in states for state in one.values()}
    if not updates:
        return saved  # it has made none
    if len(updates) > 1:
        return replace(saved, unsupported_state=different_counts(updates))
    try:
        moments = {kind: _moments(states, kind, groups, parameters) for kind in MOMENTS}
    except DamagedCheckpoint:
        raise
    except CheckpointError as error:  # of another order
        return replace(saved, unsupported_state=error.what)
    settings = [stored_group(group, files[0]) for group in groups if group["params"]]
    return replace(saved, moments=moments, updates=updates.pop(), groups=settings)


def _rank_files(directory: Path, kind: str) -> list[Path]:
    """The files of a kind in the order of ranks. Raises DamagedCheckpoint where one is missing."""
    matches = [match for one in directory.iterdir() if (match := _FILE.fullmatch(one.name)) and match[1] == kind]
    if not matches:
        return []
    sizes, ranks = {int(match[2]) for match in matches}, sorted((int(match[3]), match[0]) for match in matches)
    if len(sizes) > 1 or [rank for rank, _ in ranks] != list(range(*sizes)):
        what = (
            f"{kind}_* of ranks {shown([rank for rank, _ in ranks])}, which say that they are of {shown(sorted(sizes))}"
        )
        raise DamagedCheckpoint(what, where=directory, do="Is the copy whole? Remove files of other runs.")
    for _, name in ranks:
        check_file(directory / name, directory)
    return [directory / name for _, name in ranks]


def _check_rank(values: Iterable[object], rank: int, path: Path) -> None:
    """Raise DamagedCheckpoint for a file of another rank than its name says, as far as its tensors tell."""
    told = (one.rank for one in values if isinstance(one, RankShard))
    if (other := next((one for one in told if one not in (None, rank)), None)) is not None:
        raise DamagedCheckpoint(f"a file that rank {other} saved", where=path, do="Copy the files of all ranks again.")


def _ranks_of_a_copy(states: Sequence[Mapping[str, Any]]) -> int:
    """How many ranks together hold one copy of the model: as many as it takes until all rows of every tensor are
    there."""
    most = 1
    for name, one in states[0].items():
        if isinstance(one, RankShard) and one.cut:
            rows = accumulate(_rows(state[name]) for state in states)
            whole = (count for count, found in enumerate(rows, 1) if found >= one.shape[0])
            most = max(most, next(whole, len(states)))
    return most


def _rows(one: object) -> int:
    """How many rows of a tensor a rank has: none of what is no part of one."""
    local = one.local if isinstance(one, RankShard) else None
    return local.shape[0] if isinstance(local, LocatedTensor) and local.shape else 0


def _joined(parts: RankParts, name: str, shape: tuple[int, ...] | None = None) -> FlatTensor:
    """A tensor of its parts. A `shape` is that of flat ones, which do not say it."""
    path, first = parts[0]
    if isinstance(first, RankShard):
        if any(not isinstance(one, RankShard) or (one.shape, one.cut) != (first.shape, first.cut) for _, one in parts):
            raise DamagedCheckpoint(f"`{name}` is another tensor on other ranks", where=path, do="Is the copy whole?")
        shape = first.shape
        parts = [(path, one.local) for path, one in (parts if first.cut else parts[:1])]
    elif shape is None:
        parts = parts[:1]
    parts = [(path, contiguous(one, name, path)) for path, one in parts]
    where, found = parts[0]
    shape = found.shape if shape is None else shape
    counts = [math.prod(one.shape) for _, one in parts]
    if sum(counts) != math.prod(shape) or any(one.dtype != found.dtype for _, one in parts):
        what = f"ranks have {sum(counts)} elements of `{name}` {list(shape)}, or of several dtypes"
        raise DamagedCheckpoint(what, where=where, do="Is the copy whole?")
    return FlatTensor(TensorSpec(shape, found.dtype), EndToEnd(parts, counts))


def _moments(
    states: Sequence[tuple[Path, Mapping[int, Any]]],
    kind: str,
    groups: Sequence[Mapping[str, Any]],
    parameters: Mapping[str, TensorSpec],
) -> dict[str, FlatTensor]:
    """Moments of a kind by parameter."""
    numbers = [number for group in groups for number in group["params"]]
    if unnamed := {number for _, state in states for number in state}.difference(numbers):
        what = f"the optimizer's state of parameter {shown(min(unnamed))}, which is in none of its groups"
        raise CheckpointError(what, where=states[0][0], do=DROP_OPTIMIZER)
    parts = {number: [(path, state[number]) for path, state in states if number in state] for number in numbers}
    # FSDP 1 saves an output layer that is tied with bytes of its own
    for names in (list(parameters), [name for name in parameters if name != TIED]):
        if len(numbers) == len(names):
            by_name = set(numbers) == set(names)  # as get_state_dict has them, and EasyR1
            named = {name: name for name in names} if by_name else names_by_number(groups, names, states[0][0])
            trained = {named[number]: found for number, found in parts.items() if found}
            return {
                name: _joined([(path, state[kind]) for path, state in found], name, parameters[name].shape)
                for name, found in trained.items()
            }
        units = _units(names)
        if len(units) != len(numbers):
            continue
        flat = [[(path, state[kind]) for path, state in parts[number]] for number in numbers]
        counts = [[math.prod(parameters[name].shape) for name in unit] for unit in units]
        each = [-(-sum(unit) // len(states)) for unit in counts]
        if [[one.shape for _, one in found] for found in flat] == [[(count,)] * len(states) for count in each]:
            tensors = dict[str, FlatTensor]()
            for unit, found, sizes, count in zip(units, flat, counts, each, strict=True):
                whole = _joined(found, unit[0], (count * len(states),))
                for name, end, size in zip(unit, accumulate(sizes), sizes, strict=True):
                    spec = TensorSpec(parameters[name].shape, whole.spec.dtype)
                    tensors[name] = FlatTensor(spec, FlatSlice(whole.flat, end - size))
            return tensors
    what = f"an optimizer of {len(numbers)} parameters or units, which are none of this model's"
    raise CheckpointError(what, where=states[0][0], do=DROP_OPTIMIZER)


def _units(names: Sequence[str]) -> list[list[str]]:
    """The parameters of each unit of FSDP 1, as verl makes them: all that is in no layer, then the layers."""
    units: dict[str, list[str]] = {"": []}
    for name in names:
        layer = _LAYER.fullmatch(name)
        units.setdefault(layer[1] if layer else "", []).append(name)
    return list(units.values())
