"""How Megatron's `torch_dist` names things: iterations' directories, stacked layers, sharded objects."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from precisionctl.checkpoints import torch_zip
from precisionctl.checkpoints.output import replace_file
from precisionctl.errors import CheckpointError, DamagedCheckpoint
from precisionctl.untrusted.safe_files import check_link, has_file, read_file

TRACKER = "latest_checkpointed_iteration.txt"
BRIDGE_TRACKER = "latest_train_state.pt"
"""Megatron-Bridge's; not every version writes Megatron-LM's beside it."""

MARKER = "metadata.json"
"""Written last: a directory with it is complete."""

COMMON = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
EXTRA_STATE = "._extra_state"

COMPANIONS = Path("precisionctl/hf")
"""Where Hugging Face's files travel that Megatron has no place for."""

VERL, VERL_COMPANIONS = "dist_ckpt", "huggingface"
"""Where verl has a checkpoint without arguments, and beside it the config and tokenizer."""

OURS = "precisionctl"
"""Key of what we add to the common data; Megatron passes over it."""

_LAYER = re.compile(r"(.*\bdecoder\.layers\.)(\d{1,9})\.(.+)")
_LAYERS = re.compile(r"(.*\bdecoder\.layers\.)(?!\d+\.)(.+)")
_EXPERT = re.compile(r"(.+\.mlp\.experts\.)(linear_fc[12]\.(?:weight|bias|_extra_state))(\d{1,9})")
_EXPERTS = re.compile(r"(.+\.mlp\.experts\.)experts\.(linear_fc[12]\.(?:weight|bias|_extra_state))")
_ONE_EXPERT = re.compile(
    r"(.+\.mlp\.experts\.)(?:local_)?experts\.(\d{1,9})\.(linear_fc[12]\.(?:weight|bias|_extra_state))(_[wv])?"
)
_SHARD = re.compile(r"(.+)/shard_(\d{1,9}(?:\.\d{1,9})?)_\d+(?:\.\d+)?")


def expert_of(name: str) -> int | None:
    """The (global) expert whose tensor or module a logical name is of."""
    match = _EXPERT.fullmatch(name)
    return int(match[3]) if match else None


def layer_of(name: str) -> tuple[int, str] | None:
    """The layer of a logical name, and the name within the layer."""
    match = _LAYER.fullmatch(name)
    return (int(match[2]), match[3]) if match else None


def stack(name: str, by_layer: bool = False) -> tuple[str, tuple[int, ...]]:
    """The key that holds a logical name, and where in its leading dimensions.

    `decoder.layers.3.x` is slice 3 of `decoder.layers.x`, or a key of its own (`by_layer`: in models whose layers
    differ); `….mlp.experts.linear_fc1.weight5` is slice 5 of `….mlp.experts.experts.linear_fc1.weight`.
    """
    at: tuple[int, ...] = ()
    if (match := _LAYER.fullmatch(name)) and not by_layer:
        name, at = match[1] + match[3], (int(match[2]),)
    if match := _EXPERT.fullmatch(name):
        name, at = f"{match[1]}experts.{match[2]}", (*at, int(match[3]))
    return name, at


def leading(key: str) -> int:
    """How many of a stored tensor's dimensions count layers and experts."""
    return bool(_LAYERS.fullmatch(key)) + bool(_EXPERTS.fullmatch(key))


def unstack(key: str, at: tuple[int, ...]) -> str:
    """The logical name of a slice: the inverse of `stack`.

    Also of `….mlp.experts.experts.5.linear_fc1.weight_w`: experts have keys of their own, and gates and ups, where
    `singleton_local_shards` was set (megatron-core 0.14 to 0.16).
    """
    numbers = list(at)
    if match := _LAYERS.fullmatch(key):
        key = f"{match[1]}{numbers.pop(0)}.{match[2]}"
    if match := _EXPERTS.fullmatch(key):
        return f"{match[1]}{match[2]}{numbers.pop(0)}"
    match = _ONE_EXPERT.fullmatch(key)
    return f"{match[1]}{match[3]}{match[2]}{match[4] or ''}" if match else key


def object_key(name: str, layers: int, experts: int = 1, by_layer: bool = False) -> str:
    """Where an object of this logical name lies: those of layers and experts are shards of one, as their tensors."""
    key, at = stack(name, by_layer)
    sizes = [layers] * bool(_LAYERS.fullmatch(key)) + [experts] * bool(_EXPERTS.fullmatch(key))
    return f"{key}/shard_{'.'.join(map(str, at or [0]))}_{'.'.join(map(str, sizes or [1]))}"


def object_name(key: str) -> str | None:
    """The logical name of an object: the inverse of `object_key`. None for one that is cut in another way."""
    match = _SHARD.fullmatch(key)
    if not match:
        return None
    at, dimensions = tuple(map(int, match[2].split("."))), leading(match[1])
    return unstack(match[1], at[:dimensions]) if len(at) == max(dimensions, 1) else None


def directory_name(iteration: int | None) -> str:
    """The directory of an iteration; of a `release`, weights that belong to no run, for None."""
    return "release" if iteration is None else f"iter_{iteration:07d}"


def iteration_of(directory: Path, common: Mapping[str, Any]) -> int | None:
    """The iteration that a checkpoint's common data names; None for a `release`: weights that belong to no run."""
    if directory.name == directory_name(None):
        return None
    iteration = common.get("iteration")
    return iteration if type(iteration) is int and 0 <= iteration < 1 << 63 else None


def write_tracker(top: Path, iteration: int | None) -> None:
    """Write atomically which iteration is the newest."""
    replace_file(top / TRACKER, "release" if iteration is None else str(iteration))


def has_marker(directory: Path) -> bool:
    """Whether a directory is a checkpoint that is complete: its marker is written last."""
    return (directory / MARKER).is_file()


def find_iteration(path: Path, iteration: int | None = None, complete: Callable[[Path], bool] = has_marker) -> Path:
    """The directory of `iteration`, else the one that the tracker names, else `path` if it is one itself.

    `complete` says whether a directory is a checkpoint.

    Raises CheckpointError for an iteration that is not there, and DamagedCheckpoint for a tracker that misleads or an
    iteration that lies elsewhere.
    """
    if iteration is None and complete(path):
        return path
    there = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and complete(entry))
    advice = f"Name another iteration. Complete ones: {', '.join(there) or 'none'}."
    found = path / directory_name(_tracked(path, advice) if iteration is None else iteration)
    if found.name not in there:
        raise CheckpointError(f"{found.name} is not a complete checkpoint", where=path, do=advice)
    check_link(found, path)
    return found


def _tracked(path: Path, advice: str) -> int | None:
    if not has_file(path / TRACKER, path):
        if has_file(path / BRIDGE_TRACKER, path):
            tracker = path / BRIDGE_TRACKER  # its training state, as tensors of one element
            state = torch_zip.load(read_file(tracker, path), tracker)
            step = state.get("step") if isinstance(state, dict) else None
            if not isinstance(step, Tensor) or step.numel() != 1 or step.is_floating_point() or step < 0:
                raise DamagedCheckpoint("it names no step", where=tracker)
            return int(step)
        raise CheckpointError(f"no {TRACKER} says which iteration is meant", where=path, do=advice)
    with open(path / TRACKER, errors="replace") as file:
        text = file.read(100).strip()
    if text != "release" and not re.fullmatch("[0-9]{1,15}", text):
        raise DamagedCheckpoint(f"{TRACKER} says {text[:40]!r}, not an iteration or `release`", where=path, do=advice)
    return None if text == "release" else int(text)
