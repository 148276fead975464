"""Megatron's `_extra_state` objects: which module each belongs to, and its payload as bytes.

Experts have one each, named as their tensors are: `….mlp.experts.linear_fc1._extra_state5`.
"""

from __future__ import annotations

import io
import re
from typing import Any, NamedTuple

from precisionctl.checkpoints.torch_files import torch_zip_writer
from precisionctl.errors import DamagedCheckpoint, shown
from precisionctl.torch_when_used import torch

_NAME = re.compile(r"(.+)\._extra_state(\d{1,9})?")
_OF_1_6 = ".fused_attention"  # where TE 1.6 and 1.7 had attention's


class SavedPayload(NamedTuple):
    """A payload: the logical name of its object, its bytes, and the file or object that it was read from. `expert_rank`
    is set for that of a grouped linear, which is for all experts of this rank."""

    name: str
    data: bytes
    where: str
    expert_rank: int | None = None

    @property
    def module(self) -> str:
        """The Megatron name of its module."""
        match = _NAME.fullmatch(self.name)
        assert match
        return match[1].removesuffix(_OF_1_6)

    @property
    def expert(self) -> int | None:
        """The number of its expert; None if it is not of one expert."""
        match = _NAME.fullmatch(self.name)
        return int(match[2]) if match and match[2] else None

    @property
    def raw_name(self) -> str:
        """The key in `Fp8States.raw` for a payload that could not be decoded: the module, and with it an expert's
        number, `….linear_fc1.5`, or the rank of a grouped linear's, `….linear_fc1.rank1`."""
        if self.expert_rank is not None:
            return f"{self.module}.rank{self.expert_rank}"
        return self.module if self.expert is None else f"{self.module}.{self.expert}"


def payload_bytes(value: Any, where: str) -> bytes:
    """The bytes of the payload in an unpickled object: a tensor of bytes, or a file of TE 0.12 to 1.13. The plain
    objects of TE up to 0.5 are serialized to such a file; None gives no bytes. Raises DamagedCheckpoint for anything
    else."""
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    if isinstance(value, torch.Tensor):
        return value.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict | list) and _plain(value):
        return torch_zip_writer.dump(value)
    if value is not None:
        raise DamagedCheckpoint(f"{where} holds {shown(value)}, not FP8 state", where=where)
    return b""


def _plain(value: Any, depth: int = 8) -> bool:
    """Whether all of it is tensors and plain values."""
    if isinstance(value, dict | list | tuple):
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return depth > 0 and all(_plain(item, depth - 1) for item in items)
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str)
