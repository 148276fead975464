"""Open the checkpoint at a path: each container recognises its own; known formats that are not read are named."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from precisionctl import checkpoints
from precisionctl.checkpoints import foreign, huggingface
from precisionctl.checkpoints.base import NO_HINTS, Container, Hints, Reader
from precisionctl.checkpoints.other_trainers.trainer_trees import checkpoint_inside
from precisionctl.discover import discover
from precisionctl.errors import PrecisionctlError, UnknownFormat, nearest_path
from precisionctl.paths import above

_log = logging.getLogger(__name__)
_LOOKED_INTO, _SHOWN = 100, 10
"""Folders in one that is no checkpoint, and checkpoints among them that an error names."""


def open_checkpoint(path: Path, iteration: int | None = None, hints: Hints = NO_HINTS, *, wanted: str = "") -> Reader:
    """A Reader for the checkpoint at `path`. In a Megatron directory of several iterations `iteration` selects one
    (else the newest); `hints` say what a Megatron checkpoint does not say itself. The path may be a folder of a
    trainer's around its checkpoint (trainer_trees.py): a Reader's `path` is what was opened. If nothing known is at the
    path, the error gives `wanted` as advice, else the formats that were looked for.

    Raises UnknownFormat if no container recognises it, or it is in a format that is not read (foreign.py);
    DamagedCheckpoint if it is recognised and broken.
    """
    if not path.exists():
        raise UnknownFormat("no such file or directory", where=path, do=nearest_path(path) or "Check the path.")
    containers = discover(checkpoints, "CONTAINER", Container)
    if iteration is None and (inside := checkpoint_inside(path)):
        path = inside
    container = next((each for each in containers if each.recognise(path)), None)
    if container is None and hints.companions and huggingface.has_weight_files(path):
        container = huggingface.CONTAINER  # with the config.json of the reference
    if container is None:
        for unread in foreign.UNREAD:
            unread.check(path, path)
        advice = _advice(path, containers, wanted)
        raise UnknownFormat("there is no checkpoint in a known format", where=path, do=advice)
    reader = container.open(path, iteration, hints)
    for shown_by_tensors in foreign.TENSORS:
        shown_by_tensors.check(reader, path)
    _log.info("%s: %s, %d tensors in %d files", reader.path, reader.container, len(reader.specs), len(reader.files))
    return reader


def is_checkpoint(path: Path) -> bool:
    """Whether a container recognises a directory. It is not opened, and may be damaged."""
    return _is_known(path, discover(checkpoints, "CONTAINER", Container))


def _advice(path: Path, containers: Sequence[Container], wanted: str) -> str:
    """The advice in the error for a directory that is no checkpoint."""
    inside = sorted(path.iterdir()) if path.is_dir() else [path]
    found = [str(folder) for folder in inside[:_LOOKED_INTO] if _is_known(folder, containers)]
    if len(found) > 1:
        rest = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return f"There are several in it, give one: {', '.join(found[:_SHOWN])}{rest}."
    if found:
        return f"Did you mean {found[0]}?"
    if not inside:
        return f"The directory is empty. {wanted}".rstrip()
    around = above(path)
    if _is_known(around, containers):  # perhaps as a run, of other checkpoints that stand beside this directory
        if not any(_is_known(folder, containers) for folder in sorted(around.iterdir())[:_LOOKED_INTO]):
            return f"Did you mean {around}?"
    return wanted or "\n- ".join(["Looked for:", *(container.looked_for for container in containers)])


def _is_known(folder: Path, containers: Sequence[Container]) -> bool:
    """Whether a container recognises a directory."""
    with suppress(PrecisionctlError, OSError):
        return folder.is_dir() and any(container.recognise(folder) for container in containers)
    return False
