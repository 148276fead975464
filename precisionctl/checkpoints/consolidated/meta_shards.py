"""Meta's files: `consolidated.00.pth` and on, each a tensor-parallel rank's part of every tensor.

A tensor's parts are one below the other, or side by side, as fairscale's ColumnParallelLinear and RowParallelLinear
cut them; norms are in every file (llama/model.py). The embedding was cut by columns up to Llama 2 (ParallelEmbedding)
and by rows since (VocabParallelEmbedding), which the shapes tell.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from precisionctl.checkpoints.chunks import Box, Chunk
from precisionctl.checkpoints.hf_directory.huggingface_files import read_bin
from precisionctl.checkpoints.hf_directory.safetensors_file import JoinedTensor, Places, StoredTensor
from precisionctl.errors import DamagedCheckpoint
from precisionctl.param import TensorSpec
from precisionctl.untrusted.safe_files import check_file

FILE = re.compile(r"consolidated\.(\d{2,3})\.pth")
EMBEDDING = "tok_embeddings.weight"
_SIDE_BY_SIDE = re.compile(r"layers\.\d+\.(?:attention\.wo|feed_forward\.w2)\.weight")
_IN_EVERY_FILE = re.compile(r"(?:layers\.\d+\.(?:attention|ffn)_norm|norm)\.weight|(?:.+\.)?rope\.freqs")
_LARGEST_COPY = 1 << 20
_AGAIN = "Copy the files of the release again."


def shard_files(path: Path) -> list[Path]:
    """The files of a directory in order. Raises DamagedCheckpoint where one is missing, or no file."""
    files = sorted(each for each in path.glob("consolidated.*.pth") if FILE.fullmatch(each.name))
    for number, file in enumerate(files):
        if file.name != f"consolidated.{number:02}.pth":
            raise DamagedCheckpoint(f"consolidated.{number:02}.pth is missing", where=path, do="Download it again.")
        check_file(file, path)
    return files


def read_shards(files: Sequence[Path], hidden_size: int) -> Places:
    """The whole tensors by name. `hidden_size` tells how the embedding is cut. Raises DamagedCheckpoint for files that
    are no parts of one model, and as `read_bin`."""
    shards = [read_bin(file) for file in files]
    for file, shard in zip(files, shards, strict=True):
        if differing := sorted(shard.keys() ^ shards[0].keys()):
            what = f"`{differing[0]}` is in one of {files[0].name} and {file.name}, and not in the other"
            raise DamagedCheckpoint(what, where=files[0].parent, do=_AGAIN)
    places: Places = {}
    for name, first in shards[0].items():
        parts, spec = [shard[name] for shard in shards], first.spec
        if unequal := [file.name for file, part in zip(files, parts, strict=True) if part.spec != spec]:
            what = f"`{name}` is {list(spec.shape)} {spec.dtype} in {files[0].name}, and something else in {unequal[0]}"
            raise DamagedCheckpoint(what, where=files[0].parent, do=_AGAIN)
        if len(parts) == 1:
            places[name] = files[0], first
        elif _IN_EVERY_FILE.fullmatch(name):
            _check_equal(name, files, parts)
            places[name] = files[0], first
        elif len(spec.shape) != 2:
            raise DamagedCheckpoint(f"`{name}` is {list(spec.shape)}, no part of a matrix", where=files[0], do=_AGAIN)
        else:
            beside = bool(_SIDE_BY_SIDE.fullmatch(name)) or (name == EMBEDDING and spec.columns != hidden_size)
            (rows, columns), count = spec.shape, len(parts)
            whole = TensorSpec((rows, columns * count) if beside else (rows * count, columns), spec.dtype)
            boxes = (
                Box(0, rows, at * columns, columns) if beside else Box(at * rows, rows, 0, columns)
                for at in range(count)
            )
            chunks = (Chunk(box, file, part.offset) for box, file, part in zip(boxes, files, parts, strict=True))
            places[name] = files[0], JoinedTensor(whole, first.offset, tuple(chunks))
    return places


def _check_equal(name: str, files: Sequence[Path], parts: Sequence[StoredTensor]) -> None:
    """Raise DamagedCheckpoint unless all files have the same norm."""
    if (length := parts[0].spec.nbytes) > _LARGEST_COPY:
        raise DamagedCheckpoint(f"`{name}` has {length} bytes, and every file has all of it", where=files[0])
    copies = list[bytes]()
    for file, part in zip(files, parts, strict=True):
        with open(file, "rb") as opened:
            opened.seek(part.offset)
            copies.append(opened.read(length))
    if other := [file.name for file, copy in zip(files, copies, strict=True) if copy != copies[0]]:
        what = f"`{name}` is not the same in {files[0].name} and {other[0]}"
        raise DamagedCheckpoint(what, where=files[0].parent, do=_AGAIN)
