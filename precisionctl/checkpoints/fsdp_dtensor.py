"""PyTorch's own distributed checkpoints (DCP): with Hugging Face's names (`dcp_model.py`), or with Megatron's, which
are `fsdp_dtensor`, the checkpoints of Megatron-FSDP.

In those nothing is stacked, gate and up are separate (`linear_fc1.weight_w`, `weight_v`), experts are numbered, every
name begins with `model.module.`, and there is no FP8 state (megatron/core/transformer/fsdp_dtensor_checkpoint.py).
"""

from pathlib import Path

from precisionctl.checkpoints import dcp
from precisionctl.checkpoints.base import NO_HINTS, Container, Hints
from precisionctl.checkpoints.dcp_model import ACCELERATE, ACCELERATE_OPTIMIZER, DcpModelReader, directory_of
from precisionctl.checkpoints.megatron.keys import MARKER
from precisionctl.checkpoints.megatron.logical import EMBEDDING
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.untrusted.safe_files import check_link


def _is_complete(directory: Path) -> bool:
    """Whether a directory has PyTorch's index and not Megatron's marker."""
    return (directory / dcp.FILE).is_file() and not (directory / MARKER).exists()


def recognise(path: Path) -> bool:
    """Whether `path` is such a directory, or one of its entries is an iteration, or accelerate's model."""
    inside = (path, path / ACCELERATE, *path.glob("iter_*"))
    return path.is_dir() and any(_is_complete(directory) for directory in inside)


def open_reader(path: Path, iteration: int | None = None, hints: Hints = NO_HINTS) -> TorchDistReader | DcpModelReader:
    """Open an iteration of Megatron's, or the newest of a directory; or a model with Hugging Face's names. Raises as
    their Readers do."""
    directory = directory_of(path) if iteration is None else None
    if directory is not None:
        check_link(directory, path)
        index = dcp.read_index(directory)
        if not any(key.endswith(EMBEDDING) for key in index.tensors):
            apart = directory.parent / ACCELERATE_OPTIMIZER
            if directory == path or not _is_complete(apart):
                return DcpModelReader(path, directory, index, hints)
            check_link(apart, path)
            return DcpModelReader(path, directory, index, hints, dcp.read_index(apart))
    return TorchDistReader(path, iteration, hints, container="fsdp_dtensor", complete=_is_complete)


CONTAINER = Container(
    recognise,
    open_reader,
    f"{dcp.FILE} of a PyTorch checkpoint (DCP) with names of Hugging Face or Megatron-FSDP, there, in {ACCELERATE} or "
    "in an iteration's directory",
)
