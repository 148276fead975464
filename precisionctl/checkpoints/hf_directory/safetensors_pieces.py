"""PyTorch's distributed checkpoints (DCP) in safetensors, as HuggingFaceStorageWriter has written them with
`save_distributed` (torch 2.13, distributed/checkpoint/hf_storage.py).

Each rank has files `shard-00001-model-00001-of-00002.safetensors` of its own, with pieces of tensors under the tensors'
names, and in their metadata where each piece begins. There is no `.metadata`: a tensor is as large as its pieces reach.
So nothing here would miss the files of the last ranks; the sizes of the model do.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from precisionctl.checkpoints.hf_directory.huggingface_files import SAFETENSORS, file_format_of, unindexed
from precisionctl.checkpoints.hf_directory.safetensors_file import (
    FILE_OF_RANK,
    OFFSETS,
    header_has,
    read_described,
    saved_offsets,
)
from precisionctl.checkpoints.torch_files.dcp_metadata import DcpPiece, DcpTensor, Index
from precisionctl.checkpoints.torch_files.torch_zip import Span
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint
from precisionctl.untrusted.safe_files import check_file

_COPY = "Copy the files of all ranks again, and of one save alone."


def has_pieces(directory: Path) -> bool:
    """Whether a directory has such files, and no index. With an index, each tensor is whole, and in one file."""
    if file_format_of(directory) is not SAFETENSORS or (directory / SAFETENSORS.index).exists():
        return False
    files = unindexed(directory, SAFETENSORS)
    return any(file.is_file() and header_has(file, OFFSETS.encode()) for file in files)


def read_pieces(directory: Path) -> Index:
    """The tensors of a directory's safetensors files, all of which have pieces. Reads headers alone.

    Raises DamagedCheckpoint as `read_described` and `saved_offsets` do, for a file that says nothing of pieces, and for
    pieces that are of two tensors, there twice, or fewer or more than their tensor. Overlaps are for `check_whole`.
    """
    found: dict[str, list[tuple[DType, DcpPiece]]] = {}
    for path in sorted(directory.glob(f"*{SAFETENSORS.suffix}")):
        check_file(path, directory)
        tensors, metadata = read_described(path)
        places = saved_offsets(tensors, metadata, path)
        if tensors and not places:
            what = f"it says not of what its tensors are pieces ({OFFSETS}), as others here do"
            raise DamagedCheckpoint(what, where=path, do="Remove what does not belong to the checkpoint.")
        for name, stored in tensors.items():
            span = Span(path, stored.offset, stored.spec.nbytes)
            piece = DcpPiece(places[name], stored.spec.shape, span, bare=True)
            found.setdefault(name, []).append((stored.spec.dtype, piece))
    return Index({name: _joined(name, pieces, directory) for name, pieces in found.items()}, {})


def _joined(name: str, pieces: Sequence[tuple[DType, DcpPiece]], directory: Path) -> DcpTensor:
    """The tensor that reaches as far as its pieces do. Raises DamagedCheckpoint for pieces of several tensors, or that
    have other elements than it has."""
    dtype, first = pieces[0]
    apart: dict[tuple[int, ...], DcpPiece] = {}
    for other, piece in pieces:
        where = piece.span.path
        if other != dtype or len(piece.sizes) != len(first.sizes):
            what = f"`{name}` has pieces {dtype} {list(first.sizes)} and {other} {list(piece.sizes)}"
            raise DamagedCheckpoint(what, where=where, do=_COPY)
        # A rank without rows has an empty piece
        if math.prod(piece.sizes) and (twice := apart.setdefault(piece.offsets, piece)) is not piece:
            what = f"the piece of `{name}` at {list(piece.offsets)} is in {twice.span.path.name} too"
            raise DamagedCheckpoint(what, where=where, do=_COPY)
    ends = ([at + size for at, size in zip(one.offsets, one.sizes, strict=True)] for _, one in pieces)
    shape = tuple(map(max, zip(*ends, strict=True)))
    # Before memory of these sizes is allocated
    has = sum(math.prod(piece.sizes) for piece in apart.values())
    if has != math.prod(shape):
        what = f"the pieces of `{name}` reach to {list(shape)}, and have {has} of those {math.prod(shape)} elements"
        raise DamagedCheckpoint(what, where=directory, do=_COPY)
    return DcpTensor(shape, dtype, tuple(apart.values()) or (first,))


def file_of_other_ranks(directory: Path) -> str | None:
    """A file that one rank lacks and another has under the same number; None where all have files of the same numbers.
    It may be missing from a copy. Ranks of other pipeline stages may also not have had it."""
    found = [match for path in directory.iterdir() if (match := FILE_OF_RANK.fullmatch(path.name))]
    there = {match.group("rank", "number") for match in found}
    ranks = sorted({match["rank"] for match in found})
    numbers = sorted({match.group("number", "count") for match in found})
    lacking = (
        f"shard-{rank}-model-{number}-of-{count}{SAFETENSORS.suffix}"
        for rank in ranks
        for number, count in numbers
        if (rank, number) not in there
    )
    return next(lacking, None)
