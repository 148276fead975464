"""Open whatever is at a path: each container recognises itself."""

from pathlib import Path

from precisionctl import checkpoints
from precisionctl.checkpoints.base import Container, Reader
from precisionctl.discover import discover
from precisionctl.errors import UnknownFormat


def open_checkpoint(path: Path, iteration: int | None = None) -> Reader:
    """A Reader for the checkpoint at `path`; `iteration` picks one of a Megatron directory's.

    Raises UnknownFormat where nothing there is known, DamagedCheckpoint where it is known and broken.
    """
    if not path.exists():
        raise UnknownFormat("nothing is there", where=path)
    containers: list[Container] = discover(checkpoints, "CONTAINER")
    for container in containers:
        if container.recognise(path):
            return container.open(path, iteration)
    looked_for = "; ".join(container.looked_for for container in containers)
    raise UnknownFormat("no checkpoint is recognised there", where=path, do=f"Looked for: {looked_for}.")
