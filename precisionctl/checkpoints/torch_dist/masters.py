"""Check that an optimizer's FP32 master weights, rounded, are the stored weights.

A distributed optimizer's buckets carry no names (`torch_dist/buckets.py`). If one parameter had been mistaken for
another, its rounded master weight would differ from the stored weight.
"""

from __future__ import annotations

from precisionctl.checkpoints.chunks import in_pieces, read_rows
from precisionctl.checkpoints.megatron.carried_run import WithOptimizer
from precisionctl.checkpoints.megatron.logical import MASTER
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.errors import DROP_OPTIMIZER, DamagedCheckpoint
from precisionctl.torch_when_used import torch

_ELEMENTS = 1 << 20
"""Compared at a time."""


def prove_masters(reader: TorchDistReader) -> str:
    """Compare master weights and weights. Returns a note if some differ, as they may in a run that keeps its weights in
    FP8; an empty string if none does.

    Raises DamagedCheckpoint if most differ: then the buckets were assigned to the wrong parameters.
    """
    differing = differing_masters(reader)
    if len(differing) > len(reader.specs) // 2:
        raise DamagedCheckpoint(
            f"the optimizer's masters are not those of the weights: {len(differing)} differ, `{differing[0]}` first",
            where=reader.path,
            do=DROP_OPTIMIZER,
        )
    return f"The optimizer's master of these is not their weight: {', '.join(differing)}." if differing else ""


def differing_masters(reader: TorchDistReader) -> list[str]:
    """The parameters whose FP32 master, rounded to the weight's dtype, is not the stored weight bit for bit.

    Also those whose master has another shape. Reads both, a few megabytes at a time.
    """
    both, differing = WithOptimizer(reader), []
    for master in [name for name in reader.optimizer_specs if name.startswith(MASTER)]:
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
