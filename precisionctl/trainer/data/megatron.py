"""Megatron's tokenized data sets: `NAME.bin`, token ids, and `NAME.idx`, where each sequence and document ends. Beside
conversations `tokenize` writes `NAME.learned`, of which Megatron knows nothing: for each id a byte, 1 if it is to be
learned.

The format of `.idx`, little endian (megatron/core/datasets/indexed_dataset.py, _IndexWriter): `MMIDIDX\\0\\0`, version
1 (uint64), the ids' type (uint8), the numbers of sequences and of document ends (uint64 each). Then, for each sequence,
the number of its tokens (int32) and its byte offset (int64); and for each document end the number of sequences before
it, beginning with 0 (int64).
"""

import hashlib
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from precisionctl.errors import DataError
from precisionctl.sizes import counted
from precisionctl.tokens.tokenizer import Tokenizer
from precisionctl.trainer.data.store import FIRST, About, Samples, Tokens, cache_key, cached_folder, mapped, stats_of

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
ID_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Integer types by their code; 6 and 7 are floats, which cannot be token ids."""

BIN, IDX, LEARNED = ".bin", ".idx", ".learned"

_AT_ONCE = 1 << 20


def prefix_of(path: Path) -> Path | None:
    """The path without `.bin` or `.idx`, if `path` is one of the two or that path itself; None for other data. Raises
    DataError if one of the two is missing."""
    if path.suffix in (BIN, IDX) and with_suffix(path.with_suffix(""), IDX).is_file():
        prefix = path.with_suffix("")
    elif not path.exists() and with_suffix(path, IDX).is_file():
        prefix = path
    elif path.suffix == BIN and path.exists():
        raise DataError("the .idx beside Megatron's .bin is missing", where=path)
    else:
        return None
    if not with_suffix(prefix, BIN).is_file():
        what = "is not a file" if with_suffix(prefix, BIN).exists() else "is missing"
        raise DataError(f"the .bin beside Megatron's .idx {what}", where=prefix)
    return prefix


def load(prefix: Path, tokenizer: Tokenizer, cache: Path | None) -> Tokens:
    """The token ids in `.bin`, memory-mapped; as in Megatron, nothing is inserted between documents. A checkpoint
    without a tokenizer will do; rows are then padded with token 0.

    They are read once, for the largest id, a hash and first targets, which are kept in `cache`. Raises DataError for
    files that are damaged, have images (sequences with modes), or negative ids.
    """
    index, data, mask = (with_suffix(prefix, suffix) for suffix in (IDX, BIN, LEARNED))
    files = [index, data, *([mask] if mask.exists() else [])]
    try:
        ids, document_ends = _open(index, data)
        if mask in files and mask.stat().st_size != len(ids):
            raise DataError(f"{mask.stat().st_size} bytes, and its .bin has {len(ids)} tokens", where=mask)
        learned = np.memmap(mask, np.bool_, "r") if mask in files else None
        build = partial(_look_through, ids=ids, ends=document_ends, learned=learned, tokenizer=tokenizer, data=data)
        with cached_folder(cache, cache_key(stats_of(files), tokenizer), build) as (folder, about):
            if learned is None:
                return Tokens(ids, about)
            first = mapped(folder / FIRST, np.dtype(np.int64), len(document_ends))
            return Tokens(ids, about, Samples(learned, document_ends, first))
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=prefix) from None


def _open(index: Path, data: Path) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The ids, memory-mapped, and the number of ids before each document's end."""
    size = index.stat().st_size
    with open(index, "rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise DataError("not one of Megatron's .idx files", where=index)
    _, version, code, sequences, ends = HEADER.unpack(header)
    if version != 1 or code not in ID_TYPES:
        raise DataError(f"version {version} with values of type {code}, and not token ids of version 1", where=index)
    wanted = HEADER.size + sequences * 12 + ends * 8
    if size == wanted + sequences:
        raise DataError(
            "its sequences have modes: it holds text and images, which cannot be trained on here", where=index
        )
    if size != wanted or not sequences or not ends:
        raise DataError(f"{size} bytes cannot hold {sequences} sequences and {ends} documents", where=index)
    lengths = np.memmap(index, "<i4", "r", HEADER.size, (sequences,))
    pointers = np.memmap(index, "<i8", "r", HEADER.size + sequences * 4, (sequences,))
    documents = np.memmap(index, "<i8", "r", HEADER.size + sequences * 12, (ends,))
    dtype = np.dtype(ID_TYPES[code])
    place = 0  # the sequences must follow each other, and fill `.bin`
    for start in range(0, sequences, _AT_ONCE):
        here = slice(start, start + _AT_ONCE)
        ends_here = place + np.cumsum(lengths[here], dtype=np.int64) * dtype.itemsize
        if (lengths[here] < 0).any() or pointers[start] != place or (pointers[here][1:] != ends_here[:-1]).any():
            raise DataError("its sequences do not follow one another", where=index)
        place = int(ends_here[-1])
    if place == 0 or data.stat().st_size != place:
        raise DataError(f"{data.stat().st_size} bytes, and its .idx says {place}", where=data)
    if documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise DataError("its documents are not in order", where=index)
    ids = np.memmap(data, dtype, "r")
    after = np.append(pointers, data.stat().st_size) // dtype.itemsize
    return ids, after[documents[1:]]


def write_index(path: Path, lengths: NDArray[np.int32], code: int) -> None:
    """Write an `.idx` of documents of one sequence each, of these numbers of ids of a type in ID_TYPES."""
    count, itemsize = len(lengths), np.dtype(ID_TYPES[code]).itemsize
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, code, count, count + 1))
        file.write(lengths.data)
        place = 0
        for start in range(0, count, _AT_ONCE):
            ends = place + np.cumsum(lengths[start : start + _AT_ONCE], dtype="<i8") * itemsize
            file.write(np.append(np.asarray(place, "<i8"), ends[:-1]).data)
            place = ends[-1]
        for start in range(0, count + 1, _AT_ONCE):
            file.write(np.arange(start, min(start + _AT_ONCE, count + 1), dtype="<i8").data)


def _look_through(
    folder: Path,
    *,
    ids: NDArray[Any],
    ends: NDArray[np.int64],
    learned: NDArray[np.bool_] | None,
    tokenizer: Tokenizer,
    data: Path,
) -> About:
    """Read all ids once: their hash, the largest, and whether documents end in the end-of-text token; and what is to be
    learned, of which the first targets go into `folder`."""
    end = tokenizer.end if tokenizer.is_there else 0
    digest, largest = hashlib.sha256(f"{ids.dtype.str}".encode()), 0
    for start in range(0, len(ids), _AT_ONCE):
        piece = ids[start : start + _AT_ONCE]
        if int(piece.min()) < 0:
            raise DataError(f"a token {int(piece.min())}", where=data)
        largest = max(largest, int(piece.max()))
        digest.update(np.ascontiguousarray(piece).data)
    if learned is not None:
        digest.update(learned.data)
        # In each document, the number of its first token to be learned after its first token; its length where none is
        first_targets, before = np.empty(len(ends), np.int64), 0
        for number, document_end in enumerate(ends.tolist()):
            targets = learned[before + 1 : document_end]
            found = int(targets.argmax()) if len(targets) else 0
            first_targets[number] = found + 1 if len(targets) and targets[found] else document_end - before
            before = document_end
        first_targets.tofile(folder / FIRST)
        return About(len(ids), len(ends), largest, digest.hexdigest(), end, [])
    if not tokenizer.is_there:
        unknown = "there is no tokenizer, so it is not known whether documents end in its end-of-text token"
        return About(len(ids), None, largest, digest.hexdigest(), end, [unknown])
    last = [place - 1 for place in np.unique(ends[ends > 0])[:_AT_ONCE]]
    unended = int((ids[last] != end).sum())
    documents = counted(unended, "document does", "documents do")
    without = f"{documents} not end in the tokenizer's end-of-text token; nothing else divides them"
    return About(len(ids), None, largest, digest.hexdigest(), end, [without] if unended else [])


def with_suffix(prefix: Path, suffix: str) -> Path:
    """A file of the data set of this name, which may have dots itself."""
    return prefix.with_name(prefix.name + suffix)
