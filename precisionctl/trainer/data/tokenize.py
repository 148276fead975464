"""Tokenize records: documents, each followed by the end-of-text token, or conversations with the tokens to learn."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from precisionctl.errors import DataError
from precisionctl.tokens.samples import Completion, Conversation
from precisionctl.tokens.tokenizer import TextPiece, Tokenizer
from precisionctl.trainer.data.formats.base import Record
from precisionctl.trainer.data.shapes import Text, sample_of

PIECES_AT_ONCE, BYTES_AT_ONCE = 256, 1 << 20
"""Most documents, and most bytes, that are tokenized at a time, as tokenizers work in parallel; a longer document is
tokenized alone."""


@dataclass(frozen=True)
class Tokenized:
    """A document or a conversation: token ids, int32, and whether each is to be learned, bool, both `[tokens]`. With
    None all are learned. `notes` are for all samples so far."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_] | None = None
    notes: tuple[str, ...] = ()


def tokenize(records: Iterator[Record], tokenizer: Tokenizer) -> Iterator[Tokenized]:
    """Tokenize records lazily. The first one decides whether they are text or conversations.

    Raises DataError for a record of the other kind, and as `Tokenizer.texts` and `Tokenizer.samples`.
    """
    first = next(records, None)
    if first is None:
        return
    everything = chain([first], records)
    if isinstance(sample_of(first), Text):
        yield from _documents(everything, tokenizer)
    else:
        yield from _conversations(everything, tokenizer)


def _documents(records: Iterator[Record], tokenizer: Tokenizer) -> Iterator[Tokenized]:
    """Each document's tokens, with the tokenizer's special tokens before it and one end-of-text token after it."""
    for pieces in _batches(_text(record) for record in records):
        for ids in tokenizer.texts(pieces):
            ended = len(ids) > 0 and ids[-1] == tokenizer.end
            yield Tokenized(ids if ended else np.append(ids, np.int32(tokenizer.end)))


def _conversations(records: Iterator[Record], tokenizer: Tokenizer) -> Iterator[Tokenized]:
    for pieces in _batches(_sample(record) for record in records):
        for row in tokenizer.samples(pieces):
            yield Tokenized(row.tokens, row.learned, row.notes)


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


def _text(record: Record) -> TextPiece:
    text: str = _of_kind(record, Text).text
    try:
        return TextPiece(record.where, text.encode())
    except UnicodeEncodeError as error:  # half a surrogate pair, which JSON can express and no tokenizer takes
        raise DataError(f"not UTF-8 text: {error}", where=record.where) from None


def _sample(record: Record) -> TextPiece:
    sample: Conversation | Completion = _of_kind(record, (Conversation, Completion))
    messages = len(sample.messages) if isinstance(sample, Conversation) else 0
    try:
        return TextPiece(record.where, json.dumps(vars(sample)).encode(), messages)
    except (TypeError, ValueError, RecursionError) as error:  # parquet has types that JSON does not have
        raise DataError(f"a message that JSON cannot express: {error}", where=record.where) from None


def _of_kind(record: Record, kind: Any) -> Any:
    sample = sample_of(record)
    if not isinstance(sample, kind):
        raise DataError(
            f"text and conversations in one data set: {str(dict(record.row))[:80]}",
            where=record.where,
            do="All rows must be like the first. Use data.blend for both kinds.",
        )
    return sample
