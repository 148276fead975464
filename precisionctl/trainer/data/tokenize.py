"""Tokenize records: documents, each followed by the end-of-text token, or conversations with the tokens to learn."""

import json
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from precisionctl.errors import DataError, one_line
from precisionctl.tokens.samples import Completion, Conversation
from precisionctl.tokens.tokenizer import TextPiece, Tokenizer
from precisionctl.trainer.data.records import Record
from precisionctl.trainer.data.shapes import Text, sample_of

Made = TypeVar("Made")

PIECES_AT_ONCE, BYTES_AT_ONCE = 256, 1 << 20
"""Most documents, and most bytes, that are tokenized at a time, as tokenizers work in parallel; a longer document is
tokenized alone."""


@dataclass(frozen=True)
class Tokenized:
    """A document or a conversation: token ids, int32, and whether each is to be learned, bool, both `[tokens]`. With
    None all are learned. `notes` are for the user, on this one."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_] | None = None
    notes: tuple[str, ...] = ()


def tokenize(records: Iterator[Record], tokenizers: Sequence[Tokenizer], done: int = 0) -> Generator[Tokenized]:
    """Tokenize records lazily, in their order, by several processes of one tokenizer, but for the first ones that are
    `done`. An empty text is no document, as in Megatron's preprocess_data.py. The first record decides whether they are
    text or conversations.

    Raises DataError for a record of the other kind, and as `Tokenizer.texts` and `Tokenizer.samples`.
    """
    records = (each for each in records if each.row.get("text") != "" or not isinstance(sample_of(each), Text))
    records = islice(records, done, None)
    first = next(records, None)
    if first is None:
        return
    kind = Text if isinstance(sample_of(first), Text) else (Conversation, Completion)
    batches = _batches(_piece(record, kind, first.where) for record in chain([first], records))
    if kind is not Text:
        for rows in _by_all(tokenizers, batches, Tokenizer.samples):
            yield from (Tokenized(row.tokens, row.learned, row.notes) for row in rows)
        return
    end = tokenizers[0].end
    for documents in _by_all(tokenizers, batches, Tokenizer.texts):
        for ids in documents:  # with the tokenizer's special tokens before the text; one end-of-text token follows it
            ended = len(ids) > 0 and ids[-1] == end
            yield Tokenized(ids if ended else np.append(ids, np.int32(end)))


def _by_all(
    tokenizers: Sequence[Tokenizer],
    batches: Iterator[list[TextPiece]],
    make: Callable[[Tokenizer, Sequence[TextPiece]], Made],
) -> Iterator[Made]:
    """Apply `make` to each batch with a tokenizer that is free; yields the results in the order of the batches. Threads
    only wait for the tokenizers' processes."""
    if len(tokenizers) == 1:
        yield from (make(tokenizers[0], batch) for batch in batches)
        return
    free: SimpleQueue[Tokenizer] = SimpleQueue()
    for each in tokenizers:
        free.put(each)

    def make_one(batch: list[TextPiece]) -> Made:
        tokenizer = free.get()
        try:
            return make(tokenizer, batch)
        finally:
            free.put(tokenizer)

    pool = ThreadPoolExecutor(len(tokenizers))
    ahead: deque[Future[Made]] = deque()
    try:
        for batch in batches:
            ahead.append(pool.submit(make_one, batch))
            if len(ahead) > 2 * len(tokenizers):
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(pieces: Iterator[TextPiece]) -> Iterator[list[TextPiece]]:
    some: list[TextPiece] = []
    size = 0
    for piece in pieces:
        if some and (len(some) == PIECES_AT_ONCE or size + len(piece.content) > BYTES_AT_ONCE):
            yield some
            some, size = [], 0
        some.append(piece)
        size += len(piece.content)
    if some:
        yield some


def _piece(record: Record, kind: Any, first: str) -> TextPiece:
    """What a tokenizer's process gets of a record, whose sample must be of the `kind` of the first record, whose place
    is `first`: a document as UTF-8, a conversation as JSON."""
    sample = sample_of(record)
    if not isinstance(sample, kind):
        raise DataError(
            f"text and conversations in one data set: {str(dict(record.row))[:80]}",
            where=record.where,
            do=f"All rows must be like the first ({one_line(first)}). Use data.blend for both kinds.",
        )
    try:
        if isinstance(sample, Text):
            return TextPiece(record.where, sample.text.encode())
        messages = len(sample.messages) if isinstance(sample, Conversation) else 0
        return TextPiece(record.where, json.dumps(vars(sample)).encode(), messages)
    except UnicodeEncodeError as error:  # half a surrogate pair, which JSON can express and no tokenizer takes
        raise DataError(f"not UTF-8 text: {error}", where=record.where) from None
    except (TypeError, ValueError, RecursionError) as error:  # parquet has types that JSON does not have
        raise DataError(f"a message that JSON cannot express: {error}", where=record.where) from None
