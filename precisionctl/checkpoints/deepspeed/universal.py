"""DeepSpeed's universal checkpoints: a directory `zero/` with one for each parameter (checkpoint/ds_to_universal.py).

`fp32.pt`, `exp_avg.pt` and `exp_avg_sq.pt` are whole tensors, as such or as `{"param": tensor}`, flat if they come from
ZeRO 3; `step.pt` is Adam's count. `zero/optimizer_state.pt` has the settings: in `param_groups` those that DeepSpeed
loads, and in our own ones, in `base_optimizer_state`, all of the run before. Model states lie beside as `zero.py`
describes them, and have the shapes; frozen parameters may be in them alone.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.deepspeed.states import (
    BASE_OPTIMIZER_STATE,
    WHAT,
    ModelStates,
    check_masters,
    counts_of_updates,
    dealt_frozen,
    plain_groups,
    rank_files,
    read_states,
    whole_tensor,
)
from precisionctl.checkpoints.other_trainers.flat import FlatTensor
from precisionctl.checkpoints.other_trainers.saved_states import SavedStates
from precisionctl.checkpoints.other_trainers.trainer_run import number, stored_group
from precisionctl.checkpoints.torch_files.torch_zip import skeleton
from precisionctl.errors import DamagedCheckpoint, damage, shown
from precisionctl.param import MOMENTS, TensorSpec
from precisionctl.untrusted.safe_files import check_file, has_file

ZERO = "zero"
OPTIMIZER_STATE = "optimizer_state.pt"
FP32 = "fp32"
"""The name of the file of masters; files of moments are named like their kinds."""


def is_universal(directory: Path) -> bool:
    """Whether a directory has parameters one by one."""
    return any((directory / ZERO).glob(f"*/{FP32}.pt"))


def read_universal(directory: Path) -> SavedStates:
    """What the directory holds. Raises DamagedCheckpoint where files contradict one another, and UnsafePickle."""
    models, _ = rank_files(directory, either=True)
    states = ModelStates(models[0]) if models else None
    shapes = states.shapes if states else {}
    weights = states.stored(shapes) if states else {}
    if states and models[0].name.startswith("zero_"):  # of ZeRO 3
        weights |= dealt_frozen(states, models, directory)
    folders = sorted(one for one in (directory / ZERO).iterdir() if one.is_dir())
    frozen = [folder for folder in folders if folder.name in weights]  # a second time, in FP32
    trained = [folder for folder in folders if folder.name not in weights]
    if states:
        _check_frozen(frozen, states, weights, directory)
    masters = {folder.name: _tensor(folder / f"{FP32}.pt", directory, shapes.get(folder.name)) for folder in trained}
    moments = {
        kind: {
            folder.name: _tensor(folder / f"{kind}.pt", directory, shapes.get(folder.name))
            for folder in trained
            if has_file(folder / f"{kind}.pt", directory)
        }
        for kind in MOMENTS
    }
    if states:
        check_masters(masters, states)
    weights |= masters
    if missing := [name for name in shapes if name not in weights]:
        raise DamagedCheckpoint(f"`{missing[0]}` is missing", where=directory / ZERO, do="Copy the checkpoint again.")
    settings = directory / ZERO / OPTIMIZER_STATE
    optimizer = read_states(settings) if has_file(settings, directory) else {}
    updates = _updates(trained, optimizer, directory)
    base = optimizer.get(BASE_OPTIMIZER_STATE)
    groups = plain_groups((base if isinstance(base, dict) else optimizer).get("param_groups"))

    unread = list[str]()
    first, second = moments.values()
    if in_part := first.keys() ^ second.keys():  # one without both is a tied copy, or the family's table refuses it
        unread.append(f"moments, which `{min(in_part)}` lacks in part")
    elif first and updates is None:
        unread.append("moments, as nothing says how many updates made them, or parameters differ in it")
    kept = moments if first and not unread else {}
    known = {f"{kind}.pt" for kind in (FP32, *MOMENTS, "step")}
    if extra := {one.name for folder in folders for one in folder.iterdir() if one.name not in known}:
        unread.append(f"{shown(sorted(extra))} of its parameters")
    stored = {FP32: masters, **moments}
    return SavedStates(
        states.with_shared(weights) if states else weights,
        [*models, *(one / f"{kind}.pt" for one in trained for kind, found in stored.items() if one.name in found)],
        states.global_steps if states else None,
        moments=kept,
        updates=updates if kept else None,
        groups=[stored_group(group, settings) for group in groups],
        unsupported_state=" and ".join(unread),
    )


def _check_frozen(
    folders: Sequence[Path], states: ModelStates, weights: Mapping[str, FlatTensor], directory: Path
) -> None:
    """Raise DamagedCheckpoint where parameters that no optimizer has are others than in the model's states."""
    shapes = {folder.name: weights[folder.name].spec.shape for folder in folders}
    check_masters(
        {folder.name: _tensor(folder / f"{FP32}.pt", directory, shapes[folder.name]) for folder in folders},
        states,
        all_of_them=True,
    )
    for folder in folders:
        if has_file(folder / f"{MOMENTS[0]}.pt", directory):
            what = "a parameter that the model's states say is frozen has moments"
            raise DamagedCheckpoint(what, where=folder, do="Copy the checkpoint again.")


def _tensor(path: Path, directory: Path, shape: tuple[int, ...] | None) -> FlatTensor:
    check_file(path, directory)
    found = skeleton(path)
    tensor = whole_tensor(path, found.get("param") if isinstance(found, Mapping) else found, path.parent.name)
    if shape is None:
        return tensor
    if math.prod(shape) != math.prod(tensor.spec.shape):
        what = f"{list(tensor.spec.shape)} for a parameter {list(shape)}"
        raise DamagedCheckpoint(what, where=path, do="Is it of this checkpoint?")
    return FlatTensor(TensorSpec(shape, tensor.spec.dtype), tensor.flat)


def _updates(trained: list[Path], optimizer: Mapping[str, Any], directory: Path) -> int | None:
    """AdamW's count: that of the parameters, or, from ZeRO 3, of the groups. None if nothing stores it, or if
    parameters differ in it."""
    files = [folder / "step.pt" for folder in trained if has_file(folder / "step.pt", directory)]
    counts, settings = {number(skeleton(file), file) for file in files}, directory / ZERO / OPTIMIZER_STATE
    if not files:
        with damage(WHAT, settings):
            states = (optimizer.get("optimizer_state_dict") or {}).get("state", {}).values()
            counts = counts_of_updates(states, plain_groups(optimizer.get("param_groups")), settings)
    return counts.pop() if len(counts) == 1 else None
