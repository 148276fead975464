"""A model in megatron-core's `zarr`, its distributed format before `torch_dist`: where the pieces of each tensor are.

A tensor is a directory with `.zarray`, which says its shape, dtype and the shape of its pieces, and a file for each
piece, named after its place in the grid (zarr version 2). megatron-core compresses nothing
(megatron/core/dist_checkpointing/strategies/zarr.py, _create_zarr_array), so a piece is the bytes of its elements.
"""

import itertools
import math
import re

from precisionctl.checkpoints.nemo.files import Files, read_text
from precisionctl.checkpoints.torch_files.dcp_metadata import DcpPiece, DcpTensor
from precisionctl.checkpoints.torch_files.torch_zip import Span
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, damage, shown
from precisionctl.untrusted.safe_json import parse_json
from precisionctl.untrusted.safe_pickle import sizes

_ABOUT = "/.zarray"
_DTYPES = {
    "bfloat16": DType.bfloat16,
    "<f2": DType.float16,
    "<f4": DType.float32,
    "<f8": DType.float64,
    "<i8": DType.int64,
    "|u1": DType.uint8,
}
_OF_NO_TENSOR = re.compile(r"metadata\.json|common\.pt|(?:.*/)?\.z(?:group|attrs|metadata)|.+/shard_[^/]+\.pt")
"""Files beside the tensors: megatron-core's own, zarr's descriptions, and objects, such as the state of FP8."""


def tensors_of(files: Files, folder: str) -> dict[str, DcpTensor]:
    """The tensors in a folder by key.

    Raises DamagedCheckpoint for other arrays than megatron-core writes, for pieces that are missing or of another size,
    and for files that belong to no tensor: they may be what a wrong `.zarray` leaves out.
    """
    inside = {name.removeprefix(f"{folder}/"): span for name, span in files.items() if name.startswith(f"{folder}/")}
    keys = [name.removesuffix(_ABOUT) for name in inside if name.endswith(_ABOUT)]
    tensors = {key: _tensor(files, f"{folder}/{key}") for key in keys}
    read = {piece.span for tensor in tensors.values() for piece in tensor.pieces}
    for name, span in inside.items():
        if not (span in read or name.endswith(_ABOUT) or _OF_NO_TENSOR.fullmatch(name)):
            what = f"{shown(name)} belongs to no tensor that a .zarray describes"
            raise DamagedCheckpoint(what, where=span.path, do="Is the copy whole? Remove what does not belong to it.")
    return tensors


def _tensor(files: Files, key: str) -> DcpTensor:
    where = f"{files[key + _ABOUT]}, {key}"
    about = parse_json(read_text(files[key + _ABOUT]), where)
    with damage("not an array as megatron-core writes it", where):
        plain = {"zarr_format": 2, "compressor": None, "filters": None, "order": "C"}
        if other := [name for name, value in plain.items() if about.get(name) != value]:
            raise ValueError(f"its {other[0]} is {shown(about.get(other[0]))}")
        shape, piece, dtype = sizes(about["shape"]), sizes(about["chunks"]), _DTYPES[about["dtype"]]
        if any(size % part for size, part in zip(shape, piece, strict=True)) or not math.prod(shape):
            raise ValueError(f"a tensor {shown(shape)} in pieces {shown(piece)}")
        grid = [size // part for size, part in zip(shape, piece, strict=True)]
        if math.prod(grid) > len(files):
            raise ValueError(f"{math.prod(grid)} pieces")

    length, pieces = math.prod(piece) * dtype.itemsize, []
    for at in itertools.product(*map(range, grid)):
        name = f"{key}/{'.'.join(map(str, at)) or '0'}"
        span = files.get(name, Span(files[key + _ABOUT].path, 0, 0))
        if span.length != length:
            what = f"{name} is missing, or has not the {length} bytes of a piece"
            raise DamagedCheckpoint(what, where=span.path, do="Is the copy whole?")
        offsets = tuple(number * part for number, part in zip(at, piece, strict=True))
        pieces.append(DcpPiece(offsets, piece, span, bare=True))
    return DcpTensor(shape, dtype, tuple(pieces))
