"""Open whatever is at a path: each container recognises itself."""

from pathlib import Path

from precisionctl.checkpoints import huggingface
from precisionctl.checkpoints.base import Reader
from precisionctl.errors import UnknownFormat


def open_checkpoint(path: Path, iteration: int | None = None) -> Reader:
    """A Reader for the checkpoint at `path`; `iteration` picks one of a Megatron directory's.

    Raises UnknownFormat where nothing there is known, DamagedCheckpoint where it is known and broken.
    """
    from precisionctl.checkpoints import megatron_dist

    if not path.exists():
        raise UnknownFormat("nothing is there", where=path)
    if megatron_dist.recognise(path):
        return megatron_dist.TorchDistReader(path, iteration)
    if huggingface.recognise(path):
        return huggingface.HuggingFaceReader(path)
    looked_for = "; ".join((huggingface.LOOKED_FOR, megatron_dist.LOOKED_FOR))
    raise UnknownFormat("no checkpoint is recognised there", where=path, do=f"Looked for: {looked_for}.")
