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
        raise UnknownFormat("no such file or directory", where=path)
    containers: list[Container] = discover(checkpoints, "CONTAINER")
    for container in containers:
        if container.recognise(path):
            return container.open(path, iteration)
    looked_for = "; ".join(container.looked_for for container in containers)
    raise UnknownFormat("no checkpoint is recognised there", where=path, do=_hint(path) or f"Looked for: {looked_for}.")


def _hint(path: Path) -> str:
    """What to do about what is there instead, where that can be told; else nothing."""
    if not path.is_dir():
        return "Give the directory of the checkpoint, not a file in it."
    if snapshots := sorted(path.glob("snapshots/*/config.json")):
        return f"It is an entry of the hub's cache: give {snapshots[-1].parent}."
    if (path / "config.json").is_file():
        return (
            "There is a config.json, and no weights beside it: they are *.safetensors, or pytorch_model.bin or its "
            "parts with their index. Other formats (GGUF, TensorFlow) are not read."
        )
    if any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return "There are weights, and no config.json beside them: copy it there."
    return ""
