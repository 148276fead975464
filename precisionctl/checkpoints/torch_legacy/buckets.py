"""`distrib_optim.pt`: the file of a distributed optimizer beside a rank's model file in a Megatron `torch` checkpoint.

It holds flat tensors without names, gathered from all data-parallel ranks
(megatron/core/optimizer/distrib_optimizer.py, get_parameter_state_dp_zero). There is one buffer for each pipeline stage
and dtype, with the parameters in reverse order, each aligned to 64 elements
(megatron/core/distributed/param_and_grad_buffer.py).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.megatron.keys import expert_of
from precisionctl.checkpoints.torch_files.torch_zip import LocatedTensor, skeleton
from precisionctl.dtypes import DType
from precisionctl.errors import DROP_OPTIMIZER, DamagedCheckpoint
from precisionctl.param import KINDS, state_name

FILE = "distrib_optim.pt"
_ALIGNMENT = 64
"""Elements."""


def bucket_tensors(path: Path, stages: Sequence[Mapping[str, LocatedTensor]]) -> Iterator[tuple[str, LocatedTensor]]:
    """Locate the optimizer's tensors in a rank's `distrib_optim.pt`: pairs of the name
    `optimizer.state.<kind>.<parameter>` and the place in the file.

    `stages` are the parameters of each pipeline stage on the rank, in the order of its state dict. Raises
    DamagedCheckpoint where the buffers do not match these parameters.
    """
    saved = skeleton(path)
    optimizers = saved if isinstance(saved, list) else [saved]  # with expert parallelism: dense, then experts
    for number, buffers in enumerate(optimizers):
        if buffers is None:
            continue
        if not isinstance(buffers, dict) or buffers.get("buckets_coalesced") is not True:
            what = "its buckets are stored one by one, as before megatron-core 0.6" if isinstance(buffers, dict) else ""
            raise DamagedCheckpoint(what or "it holds no buffers", where=path, do=DROP_OPTIMIZER)
        # the parameters of each buffer: those of one stage and dtype
        only = None if len(optimizers) == 1 else number == 1  # experts, or all others
        groups: list[dict[str, LocatedTensor]] = []
        for stage in stages:
            by_dtype: dict[DType, dict[str, LocatedTensor]] = {}
            for name, tensor in stage.items():
                if only in (None, expert_of(name) is not None):
                    by_dtype.setdefault(tensor.dtype, {})[name] = tensor
            groups += by_dtype.values()
        tables = {key: table for key, table in buffers.items() if type(key) is int}
        if sorted(tables) != list(range(len(groups))):
            raise DamagedCheckpoint(
                f"{len(tables)} buffers for {len(groups)} groups of parameters", where=path, do=DROP_OPTIMIZER
            )
        for index, group in enumerate(groups):
            yield from _buffer(tables[index], group, path)


def _buffer(table: Any, group: Mapping[str, LocatedTensor], path: Path) -> Iterator[tuple[str, LocatedTensor]]:
    """Locate the tensors of one buffer, which holds the parameters of `group`."""
    (of_dtype,) = table.values() if isinstance(table, dict) and len(table) == 1 else (None,)
    flat = [of_dtype.get(kind) for kind in KINDS] if isinstance(of_dtype, dict) else [None]
    if not all(isinstance(tensor, LocatedTensor) and len(tensor.shape) == 1 for tensor in flat):
        raise DamagedCheckpoint("a buffer of the optimizer is not flat, or not there", where=path, do=DROP_OPTIMIZER)
    end = 0
    starts = {}
    for name, parameter in reversed(list(group.items())):
        starts[name] = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = starts[name] + math.prod(parameter.shape)
    for kind, tensor in zip(KINDS, flat, strict=True):
        assert isinstance(tensor, LocatedTensor)
        if tensor.shape != (end,):
            what = f"the optimizer's {kind} has {tensor.shape[0]} elements, its parameters {end}"
            raise DamagedCheckpoint(what, where=path, do=DROP_OPTIMIZER)
        for name, parameter in group.items():
            offset = tensor.offset + starts[name] * tensor.dtype.itemsize
            yield state_name(kind, name), LocatedTensor(tensor.dtype, parameter.shape, offset)
