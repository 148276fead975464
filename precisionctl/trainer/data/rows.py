"""Rows of tokens to train on, as slices of one flat array, which may be memory-mapped.

Documents are concatenated and cut into rows of `sequence_length` targets. Each conversation is a row, or, with packing,
several share one.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from precisionctl.errors import DataError
from precisionctl.paths import StrPath
from precisionctl.sizes import counted
from precisionctl.tokens.tokenizer import Tokenizer
from precisionctl.trainer.data import megatron
from precisionctl.trainer.data.batch import Batch, Piece, make_batch
from precisionctl.trainer.data.find import check_named, source_of
from precisionctl.trainer.data.order import Order
from precisionctl.trainer.data.store import OnTokens, Samples, Tokens, tokenized


class RowLayout(Protocol):
    """Where rows are in the flat array."""

    def __len__(self) -> int: ...

    def pieces(self, row: int) -> list[slice]:
        """The slices of a row, one for each text in it."""
        ...

    @property
    def identity(self) -> bytes:
        """Bytes that are equal only for equal layouts."""
        ...


@dataclass(frozen=True)
class EqualRows:
    """Rows of `length` targets each. A row's first token is the previous row's last target, so no target is lost."""

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
class VariableRows:
    """Rows of one or several texts: row `i` has the pieces `[first[i], first[i + 1])`, and piece `p` has the tokens
    `[starts[p], ends[p])`; all int64."""

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
    """Rows of `tokens`. Those that are `learned` (all, if it is None) are targets. The tokens of a batch are divided by
    `ranks` ranks.

    `padding` is the token to pad with, `largest` the largest token and `digest` a hash of all tokens.
    """

    tokens: NDArray[np.integer[Any]]
    learned: NDArray[np.bool_] | None
    layout: RowLayout
    padding: int
    largest: int
    digest: str
    notes: tuple[str, ...] = ()
    ranks: int = 1

    def __len__(self) -> int:
        return len(self.layout)

    @property
    def has_equal_rows(self) -> bool:
        """Whether all rows have one length and are not packed."""
        return isinstance(self.layout, EqualRows)

    def shared_by(self, ranks: int) -> "Rows":
        """The same rows, for batches whose tokens are divided by this many ranks."""
        return replace(self, ranks=ranks)

    @property
    def fingerprint(self) -> str:
        """A hash of the data that is trained on, independent of the file's place."""
        return hashlib.sha256(self.digest.encode() + self.layout.identity).hexdigest()

    def require_vocabulary(self, size: int) -> None:
        """Raise DataError for a token that a model with `size` of them does not know."""
        largest = max(self.largest, self.padding)
        if largest >= size:
            raise DataError(
                f"the data has token {largest}, but the model's last token is {size - 1}",
                do="Give the checkpoint the tokenizer that its model was trained with, and data made with it.",
            )

    def pieces(self, row: int) -> list[Piece]:
        learned = self.learned
        return [
            Piece(self.tokens[piece], None if learned is None else learned[piece]) for piece in self.layout.pieces(row)
        ]

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The rows of these numbers, padded at the right."""
        return make_batch([self.pieces(number) for number in numbers], self.padding, self.ranks)

    def order(self, seed: int) -> Order:
        return Order(len(self), seed)


def load_rows(
    data: StrPath,
    tokenizer: Tokenizer,
    sequence_length: int,
    *,
    packing: bool = False,
    cache: Path | None = None,
    on_tokens: OnTokens = lambda count: None,
) -> Rows:
    """The rows of a file, a directory of files, a Megatron data set (named with `.bin`, `.idx` or neither), or what
    `datasets` reads (HfDataset).

    `packing` packs conversations into rows of `sequence_length`. Tokens are cached in the folder `cache`; without one
    they are made anew each time. Raises DataError for a path, a text or a row that cannot be used, EnvironmentProblem
    for parquet without pyarrow, and as `HfDataset.pinned`.
    """
    if prefix := megatron.prefix_of(Path(data)):
        tokens = megatron.load(prefix, tokenizer, cache)
    else:
        tokens = tokenized(source_of(data, cache), tokenizer, cache, on_tokens)
    if tokens.samples is not None:
        return _sample_rows(tokens, tokens.samples, sequence_length, packing, data)
    count = (len(tokens.ids) - 1) // sequence_length
    if not len(tokens.ids):
        raise DataError("there is no text in it, and no row", where=data)
    if count < 1:
        raise DataError(
            f"{counted(len(tokens.ids), 'token is', 'tokens are')} fewer than the {sequence_length + 1} of one row",
            where=data,
            do="Give more text or a smaller data.sequence_length.",
        )
    return Rows(
        tokens.ids,
        None,
        EqualRows(count, sequence_length),
        tokens.about.end,
        tokens.about.largest,
        tokens.about.digest,
        tuple(tokens.about.notes),
    )


def check_path(data: StrPath) -> None:
    """Raise DataError if the path of some data leads nowhere; no folder is read, and of the Hub nothing is asked."""
    if megatron.prefix_of(Path(data)) is None:
        check_named(data)


def check_there(data: StrPath, tokenizer: Tokenizer) -> None:
    """Raise DataError if there is nothing for `load_rows`, or not the tokenizer that it needs; no file is read."""
    is_text = megatron.prefix_of(Path(data)) is None
    if is_text:
        source_of(data)
    if is_text or tokenizer.is_there:
        tokenizer.check()


def _sample_rows(tokens: Tokens, samples: Samples, length: int, packing: bool, data: StrPath) -> Rows:
    """Rows of conversations, cut to `length` targets; those without a target to learn are left out, with a note."""
    starts = np.concatenate([np.zeros(1, np.int64), samples.ends[:-1]])
    sizes = samples.ends - starts
    cut = np.minimum(sizes, length + 1)
    kept = samples.first_target < cut
    if not (samples.first_target < sizes).any():
        raise DataError("no conversation has text of the assistant to learn", where=data)
    if not kept.any():
        needed = int(samples.first_target[samples.first_target < sizes].min())
        raise DataError(
            f"every conversation is cut to {counted(length, 'token')} before the assistant says anything",
            where=data,
            do=f"Raise data.sequence_length: to {needed} for the first word of one, to more for whole answers.",
        )
    notes = list(tokens.about.notes)
    if longer := int((sizes > length + 1).sum()):
        notes.append(f"{counted(longer, 'conversation was', 'conversations were')} cut to {counted(length, 'token')}")
    if empty := int((~kept).sum()):
        notes.append(f"{counted(empty, 'conversation was', 'conversations were')} left out: nothing there to learn")
    starts, sizes = starts[kept], cut[kept]
    first = np.arange(len(sizes) + 1)
    if packing:
        packed = pack_texts((sizes - 1).tolist(), length)
        order = np.concatenate([np.asarray(row) for row in packed])
        first = np.cumsum([0, *map(len, packed)])
        starts, sizes = starts[order], sizes[order]
        full = (sizes - 1).sum() / (len(packed) * length)
        conversations = counted(len(sizes), "conversation is", "conversations are")
        notes.append(f"{conversations} packed into {counted(len(packed), 'row')}, {full:.0%} full")
    where = VariableRows(first.astype(np.int64), starts, starts + sizes)
    about = tokens.about
    return Rows(tokens.ids, samples.learned, where, about.end, about.largest, about.digest, tuple(notes))


def pack_texts(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack texts by best-fit decreasing: the longest first, each into the row in which it leaves the least room.

    Returns the numbers of the texts in each row. No row exceeds `capacity`, and no size may. The result depends on the
    sizes alone. It needs at most 11/9 of the fewest possible rows, plus one (Johnson, 1974).
    """
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # rows by the room that is left in them
    rooms: list[int] = []  # the keys of it, in order
    for text in np.argsort(-np.asarray(sizes, np.int64), kind="stable").tolist():
        size = int(sizes[text])
        nearest = bisect_left(rooms, size)
        if nearest == len(rooms):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room = rooms[nearest]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[nearest]
        rows[row].append(text)
        left = room - size
        if left not in with_room:
            with_room[left] = []
            insort(rooms, left)
        with_room[left].append(row)
    return rows
