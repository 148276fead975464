"""Open whatever is at a path: each container recognises itself, and what none does is told by what it is."""

from pathlib import Path

from precisionctl import checkpoints
from precisionctl.checkpoints import foreign
from precisionctl.checkpoints.base import NO_HINTS, Container, Hints, Reader
from precisionctl.discover import discover
from precisionctl.errors import UnknownFormat


def open_checkpoint(path: Path, iteration: int | None = None, hints: Hints = NO_HINTS) -> Reader:
    """A Reader for the checkpoint at `path`. Of a Megatron directory `iteration` picks one, and `hints` tell what it
    does not say itself.

    Raises UnknownFormat where nothing there is known, or is what is not read; DamagedCheckpoint where it is known and
    broken.
    """
    if not path.exists():
        raise UnknownFormat("no such file or directory", where=path)
    foreign.check_path(path)
    containers: list[Container] = discover(checkpoints, "CONTAINER")
    for container in containers:
        if container.recognise(path):
            reader = container.open(path, iteration, hints)
            foreign.check_tensors(reader, path)
            return reader
    foreign.check_unread(path)
    looked_for = "; ".join(container.looked_for for container in containers)
    raise UnknownFormat("no checkpoint is recognised there", where=path, do=f"Looked for: {looked_for}.")
