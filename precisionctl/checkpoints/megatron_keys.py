"""How Megatron's `torch_dist` names things: iterations' directories, stacked layers, sharded objects."""

import os
import re
from pathlib import Path

from precisionctl.errors import CheckpointError, DamagedCheckpoint

TRACKER = "latest_checkpointed_iteration.txt"
MARKER = "metadata.json"
"""Written last: a directory with it is complete."""

COMMON = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
EXTRA_STATE = "._extra_state"

COMPANIONS = Path("precisionctl/hf")
"""Where Hugging Face's files travel that Megatron has no place for."""

OURS = "precisionctl"
"""Key of what we add to the common data; Megatron passes over it."""

_NUMBERED = re.compile(r"(.*\bdecoder\.layers\.)(\d+)\.(.+)")
_STACKED = re.compile(r"(.*\bdecoder\.layers\.)(?!\d+\.)(.+)")
_SHARD = re.compile(r"(.+)/shard_(\d+)_(\d+)")


def stack(name: str) -> tuple[str, int | None]:
    """The key that holds a logical name, and which slice: `decoder.layers.3.x` is slice 3 of `decoder.layers.x`."""
    match = _NUMBERED.fullmatch(name)
    return (match[1] + match[3], int(match[2])) if match else (name, None)


def is_stacked(key: str) -> bool:
    return _STACKED.fullmatch(key) is not None


def unstack(key: str, layer: int) -> str:
    """The logical name of slice `layer` of a stacked key: the inverse of `stack`."""
    match = _STACKED.fullmatch(key)
    return f"{match[1]}{layer}.{match[2]}" if match else key


def object_key(name: str, layers: int) -> str:
    """Where an object of this logical name lies: objects of layers are shards of one, as their tensors are."""
    key, layer = stack(name)
    return f"{key}/shard_0_1" if layer is None else f"{key}/shard_{layer}_{layers}"


def object_name(key: str) -> str | None:
    """The logical name of an object: the inverse of `object_key`. None for an object that is cut more than once."""
    match = _SHARD.fullmatch(key)
    return unstack(match[1], int(match[2])) if match else None


def directory_name(iteration: int | None) -> str:
    """The directory of an iteration; of a `release`, weights that belong to no run, for None."""
    return "release" if iteration is None else f"iter_{iteration:07d}"


def write_tracker(top: Path, iteration: int | None) -> None:
    """Say which iteration is the newest, at once: readers see the old one or the new one."""
    beside = top / (TRACKER + ".new")
    beside.write_text("release" if iteration is None else str(iteration))
    os.replace(beside, top / TRACKER)


def find_iteration(path: Path, iteration: int | None = None) -> Path:
    """The directory of `iteration`, else the one that the tracker names, else `path` if it is one itself.

    Raises CheckpointError for an iteration that is not there, and DamagedCheckpoint for a tracker that misleads.
    """
    if iteration is None and (path / MARKER).is_file():
        return path
    found = path / directory_name(_tracked(path) if iteration is None else iteration)
    if not (found / MARKER).is_file():
        raise CheckpointError(f"{found.name} is not a complete checkpoint", where=path, do=_complete(path))
    return found


def _tracked(path: Path) -> int | None:
    if not (path / TRACKER).is_file():
        raise CheckpointError(f"no {TRACKER} says which iteration is meant", where=path, do=_complete(path))
    text = (path / TRACKER).read_text(errors="replace").strip()
    if text != "release" and not re.fullmatch("[0-9]{1,15}", text):
        raise DamagedCheckpoint(
            f"{TRACKER} says {text[:40]!r}, not an iteration or `release`", where=path, do=_complete(path)
        )
    return None if text == "release" else int(text)


def _complete(path: Path) -> str:
    there = sorted(marker.parent.name for marker in path.glob(f"*/{MARKER}"))
    return f"Name another iteration. Complete ones: {', '.join(there) or 'none'}."
