"""Rows of tokens to train on: where each begins and ends in one flat array, which may lie on a disk.

Documents are laid end to end and cut into rows of `sequence_length` targets. Of conversations each is a row, or as
many share one as fit into it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from precisionctl.errors import DataError
from precisionctl.tokens.tokenizer import Tokenizer
from precisionctl.trainer.data import megatron
from precisionctl.trainer.data.batch import Batch, Piece, make_batch
from precisionctl.trainer.data.formats.find import files_of
from precisionctl.trainer.data.order import Order
from precisionctl.trainer.data.packing import pack
from precisionctl.trainer.data.store import OnTokens, Samples, Tokens, key_of, tokenized


class Cut(Protocol):
    """Where rows are in the flat array: a row is one piece, or several."""

    def __len__(self) -> int: ...

    def pieces(self, row: int) -> list[slice]: ...

    @property
    def identity(self) -> bytes:
        """Equal for equal cuts alone."""
        ...


@dataclass(frozen=True)
class EvenCut:
    """Rows of `length` targets; each row's first token is the last one's last target, so none is lost between."""

    rows: int
    length: int

    def __len__(self) -> int:
        return self.rows

    def pieces(self, row: int) -> list[slice]:
        return [slice(row * self.length, (row + 1) * self.length + 1)]

    @property
    def identity(self) -> bytes:
        return f"{self.rows} of {self.length}".encode()


@dataclass(frozen=True)
class PieceCut:
    """Row `i` has the pieces `[first[i], first[i + 1])`, and piece `p` the tokens `[starts[p], ends[p])`. int64."""

    first: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.first) - 1

    def pieces(self, row: int) -> list[slice]:
        here = slice(self.first[row], self.first[row + 1])
        return [slice(start, end) for start, end in zip(self.starts[here], self.ends[here], strict=True)]

    @property
    def identity(self) -> bytes:
        return b"".join(array.tobytes() for array in (self.first, self.starts, self.ends))


@dataclass(frozen=True)
class Rows:
    """Rows of `tokens`, of which those are targets that are `learned`, or all where that is None. The tokens of a batch
    are shared by so many `ranks`.

    `largest` is the largest token and `digest` a hash of them all, so that nothing need be read to know them.
    """

    tokens: NDArray[np.integer[Any]]
    learned: NDArray[np.bool_] | None
    cut: Cut
    padding: int
    largest: int
    digest: str
    notes: tuple[str, ...] = ()
    ranks: int = 1

    def __len__(self) -> int:
        return len(self.cut)

    @property
    def is_even(self) -> bool:
        """Whether all rows are of one text, and of one length."""
        return isinstance(self.cut, EvenCut)

    def shared_by(self, ranks: int) -> "Rows":
        return replace(self, ranks=ranks)

    @property
    def fingerprint(self) -> str:
        """A hash of what is trained on, wherever the file is."""
        return hashlib.sha256(self.digest.encode() + self.cut.identity).hexdigest()

    def require_vocabulary(self, size: int) -> None:
        """Raise DataError for a token that a model with `size` of them does not know."""
        largest = max(self.largest, self.padding)
        if largest >= size:
            raise DataError(
                f"the data has token {largest}, but the model's last token is {size - 1}",
                do="Give the checkpoint the tokenizer that its model was trained with, and data made with it.",
            )

    def pieces(self, row: int) -> list[Piece]:
        cuts = self.cut.pieces(row)
        return [Piece(self.tokens[cut], None if self.learned is None else self.learned[cut]) for cut in cuts]

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The rows of these numbers, padded at the right."""
        return make_batch([self.pieces(number) for number in numbers], self.padding, self.ranks)

    def order(self, seed: int) -> Order:
        return Order(len(self), seed)


def load_rows(
    path: Path,
    tokenizer: Tokenizer,
    sequence_length: int,
    *,
    packing: bool = False,
    cache: Path | None = None,
    on_tokens: OnTokens = lambda count: None,
) -> Rows:
    """The rows of a file, a directory of files, or a data set of Megatron's: its `.bin`, its `.idx` or neither.

    `packing` puts conversations together into rows of `sequence_length`. Tokens are kept in the folder `cache` and
    found there again; without one they are tokenized anew. Raises DataError for a path, a text or a row that cannot be
    used, EnvironmentProblem for parquet without pyarrow.
    """
    prefix = megatron.prefix_of(path)
    tokens = megatron.load(prefix, tokenizer, cache) if prefix else tokenized(path, tokenizer, cache, on_tokens)
    if tokens.samples is not None:
        return _sample_rows(tokens, tokens.samples, sequence_length, packing, path)
    count = (len(tokens.ids) - 1) // sequence_length
    if count < 1:
        raise DataError(
            f"{len(tokens.ids)} tokens are fewer than one row of {sequence_length}",
            where=path,
            do="Give more text or a smaller data.sequence_length.",
        )
    return Rows(
        tokens.ids,
        None,
        EvenCut(count, sequence_length),
        tokens.about.end,
        tokens.about.largest,
        tokens.about.digest,
        tuple(tokens.about.notes),
    )


def check_there(path: Path, tokenizer: Tokenizer) -> None:
    """Raise DataError where `load_rows` would find nothing; no file is read."""
    if megatron.prefix_of(path) is None:
        key_of(files_of(path), tokenizer)


def _sample_rows(tokens: Tokens, samples: Samples, length: int, packing: bool, path: Path) -> Rows:
    """Conversations cut to `length` targets; those with nothing left to learn are left out, and counted."""
    starts = np.concatenate([np.zeros(1, np.int64), samples.ends[:-1]])
    sizes = samples.ends - starts
    cut = np.minimum(sizes, length + 1)
    kept = samples.first_target < cut
    if not kept.any():
        raise DataError("no conversation has a word of the assistant to learn", where=path)
    notes = list(tokens.about.notes)
    if longer := int((sizes > length + 1).sum()):
        notes.append(f"{longer} conversations were cut to {length} tokens")
    if empty := int((~kept).sum()):
        notes.append(f"{empty} conversations were left out: nothing in them to learn")
    starts, sizes = starts[kept], cut[kept]
    first = np.arange(len(sizes) + 1)
    if packing:
        packed = pack((sizes - 1).tolist(), length)
        order = np.concatenate([np.asarray(row) for row in packed])
        first = np.cumsum([0, *map(len, packed)])
        starts, sizes = starts[order], sizes[order]
        full = (sizes - 1).sum() / (len(packed) * length)
        notes.append(f"{len(sizes)} conversations are packed into {len(packed)} rows, which are {full:.0%} full")
    where = PieceCut(first.astype(np.int64), starts, starts + sizes)
    about = tokens.about
    return Rows(tokens.ids, samples.learned, where, about.end, about.largest, about.digest, tuple(notes))
