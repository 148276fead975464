"""Experts in MXFP4, as gpt-oss has them: `experts.gate_up_proj_blocks`, bytes `[experts, rows, columns / 32, 16]` of
two codes of E2M1 each, and `..._scales`, a byte for each block, which `quant_methods/mxfp4.py` reads.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from precisionctl.checkpoints.safetensors_file import StoredTensor
from precisionctl.errors import DamagedCheckpoint
from precisionctl.param import TensorSpec

_BLOCKS = re.compile(r"(.+\.experts\.[a-z_]+)_blocks(\[\d+\])")
_BYTES = 16
"""Of a block of 32."""


def unpacked(places: Mapping[str, tuple[Path, StoredTensor]]) -> dict[str, tuple[Path, StoredTensor]]:
    """The tensors of a directory, in which blocks of an expert are the matrix of codes that they hold.

    Raises DamagedCheckpoint for blocks or scales that are no bytes, and for blocks of another shape.
    """
    return {name: (file, _unpacked(name, file, stored, places)) for name, (file, stored) in places.items()}


def _unpacked(
    name: str, file: Path, stored: StoredTensor, places: Mapping[str, tuple[Path, StoredTensor]]
) -> StoredTensor:
    match = _BLOCKS.fullmatch(name)
    if match is None:
        return stored
    scales = places.get(f"{match[1]}_scales{match[2]}")
    for kind, spec in ((name, stored.spec), (f"{match[1]}_scales", scales[1].spec if scales else None)):
        if spec is not None and spec.dtype != torch.uint8:
            dtype = str(spec.dtype).removeprefix("torch.")
            raise DamagedCheckpoint(f"`{kind}` is {dtype}; MXFP4 is made of bytes", where=file)
    shape = stored.spec.shape
    if len(shape) != 3 or shape[2] != _BYTES:
        raise DamagedCheckpoint(
            f"`{name}` is {list(shape)}; blocks of MXFP4 are [rows, columns / 32, {_BYTES}]", where=file
        )
    return replace(stored, spec=TensorSpec((shape[0], 2 * _BYTES * shape[1]), torch.float8_e4m3fn), packed=True)
