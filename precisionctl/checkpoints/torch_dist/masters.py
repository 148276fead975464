"""Check that an optimizer's FP32 master weights, rounded, are the stored weights.

A distributed optimizer's buckets carry no names (`torch_dist/buckets.py`). If one parameter had been mistaken for
another, its rounded master weight would differ from the stored weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from precisionctl.checkpoints.base import WithOptimizer
from precisionctl.checkpoints.chunks import in_pieces, read_rows
from precisionctl.checkpoints.megatron.logical import MASTER
from precisionctl.errors import DROP_OPTIMIZER, DamagedCheckpoint
from precisionctl.sizes import listed
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from precisionctl.checkpoints.torch_dist.reader import TorchDistReader

_ELEMENTS = 1 << 20
"""Compared at a time."""


def prove_masters(reader: TorchDistReader) -> str:
    """Compare master weights and weights. Returns a note if some differ, as they may in a run that keeps its weights in
    FP8; an empty string if none does.

    Raises DamagedCheckpoint if most differ: then the buckets were assigned to the wrong parameters.
    """
    differing = differing_masters(reader)
    check_differing(differing, len(_masters(reader)), reader.path, DROP_OPTIMIZER)
    return f"The optimizer's master of these is not their weight: {listed(differing, 4)}." if differing else ""


def check_differing(
    differing: Sequence[str], compared: int, where: Path, do: str, *, all_of_them: bool = False
) -> None:
    """Raise DamagedCheckpoint unless most of the masters that were `compared`, or all, are their weights: then they are
    other parameters'. `differing` are the names of those that are not."""
    if len(differing) > (0 if all_of_them else compared // 2):
        what = f"FP32 masters are not those of the weights: {len(differing)} of {compared}, `{differing[0]}` first"
        raise DamagedCheckpoint(what, where=where, do=do)


def _masters(reader: TorchDistReader) -> list[str]:
    return [name for name in reader.optimizer_specs if name.startswith(MASTER)]


def differing_masters(reader: TorchDistReader) -> list[str]:
    """The parameters whose FP32 master, rounded to the weight's dtype, is not the stored weight bit for bit.

    Also those whose master has another shape. Reads both, a few megabytes at a time.
    """
    both, differing = WithOptimizer(reader), []
    for master in _masters(reader):
        name = master.removeprefix(MASTER)
        weight = reader.specs.get(name)
        if weight is None or weight.shape != reader.optimizer_specs[master].shape:
            differing.append(name)
            continue
        for row, rows in in_pieces(0, weight.rows, weight.columns, _ELEMENTS):
            rounded = read_rows(both, master, row, rows).to(weight.dtype.torch)
            if not torch.equal(rounded.view(torch.uint8), read_rows(both, name, row, rows).view(torch.uint8)):
                differing.append(name)
                break
    return differing
