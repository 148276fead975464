"""Read `fsdp_dtensor`, the checkpoints of Megatron-FSDP: PyTorch's distributed format with Megatron's names.

Nothing is stacked, gate and up are separate (`linear_fc1.weight_w`, `weight_v`), experts are numbered, every name
begins with `model.module.`, and there is no FP8 state (megatron/core/transformer/fsdp_dtensor_checkpoint.py).
"""

from pathlib import Path

from precisionctl.checkpoints import dcp
from precisionctl.checkpoints.base import NO_HINTS, Container, Hints
from precisionctl.checkpoints.megatron.keys import MARKER
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader


def _is_complete(directory: Path) -> bool:
    """Whether a directory has PyTorch's index and not Megatron's marker."""
    return (directory / dcp.FILE).is_file() and not (directory / MARKER).exists()


def recognise(path: Path) -> bool:
    """Whether `path` is the directory of an iteration, or one of its entries is."""
    return path.is_dir() and any(_is_complete(directory) for directory in (path, *path.glob("iter_*")))


def open_reader(path: Path, iteration: int | None = None, hints: Hints = NO_HINTS) -> TorchDistReader:
    """Open an iteration, or the newest of a directory. Raises as TorchDistReader."""
    return TorchDistReader(path, iteration, hints, container="fsdp_dtensor", complete=_is_complete)


CONTAINER = Container(
    recognise, open_reader, f"{dcp.FILE} of a PyTorch checkpoint of Megatron-FSDP, there or in an iteration's directory"
)
