"""Conversions as tests make them, and what is looked at of a result."""

from pathlib import Path
from typing import Any

import torch

from precisionctl.checkpoints.base import Reader, read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_conversion import Conversion, plan_conversion
from precisionctl.conversion.work import Work, execute


def run(
    source: Path,
    destination: Path,
    to: Any,
    precision: Any = "keep",
    *,
    workers: int = 2,
    verify: bool = False,
    **options: Any,
) -> Work:
    """`precisionctl convert`; further options are those of a Conversion."""
    work = plan_conversion(Conversion(source, destination, to, precision, **options))
    execute(work, workers=workers, verify=verify)
    return work


def tree(directory: Path) -> dict[str, bytes]:
    """The bytes of all files in a directory, by their paths in it."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, as stored."""
    reader: Reader = open_checkpoint(path)
    return {name: read_tensor(reader, name) for name in reader.specs}


def assert_same_tensors(a: Path, b: Path) -> None:
    left, right = tensors(a), tensors(b)
    assert set(left) == set(right)
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8)), name
