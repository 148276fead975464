"""Records as tokens: documents with the end-of-text token behind each, or conversations with what is learned marked."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from precisionctl.errors import DataError
from precisionctl.trainer.data.chat import ChatTemplate, chat_row, completion_row, require_utf8
from precisionctl.trainer.data.formats.base import Record
from precisionctl.trainer.data.shapes import Completion, Conversation, Text, sample_of

DOCUMENTS_AT_ONCE = 256
"""Tokenizers work on many documents in parallel."""


@dataclass(frozen=True)
class Tokenized:
    """A document or a conversation: token ids, int32, and whether each is to be learned, bool, both `[tokens]`; None
    learns all. `notes` are on all that came before it, too."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_] | None = None
    notes: tuple[str, ...] = ()


def tokenize(records: Iterator[Record], tokenizer: PreTrainedTokenizerBase) -> Iterator[Tokenized]:
    """Every record as tokens, as it is asked for. The first one says whether this is text or conversations.

    Raises DataError for a record that is not of that kind, and what `chat_row` raises.
    """
    first = next(records, None)
    if first is None:
        return
    everything = chain([first], records)
    if isinstance(sample_of(first), Text):
        yield from _documents(everything, tokenizer)
    else:
        yield from _conversations(everything, tokenizer)


def _documents(records: Iterator[Record], tokenizer: PreTrainedTokenizerBase) -> Iterator[Tokenized]:
    """Each document's tokens, with what the tokenizer puts before it and one end-of-text token behind it."""
    texts = (_text(record) for record in records)
    while some := list(islice(texts, DOCUMENTS_AT_ONCE)):
        for ids in tokenizer(some, verbose=False)["input_ids"]:
            ended = ids and ids[-1] == tokenizer.eos_token_id
            yield Tokenized(np.asarray(ids if ended else [*ids, tokenizer.eos_token_id], np.int32))


def _conversations(records: Iterator[Record], tokenizer: PreTrainedTokenizerBase) -> Iterator[Tokenized]:
    if not tokenizer.is_fast:
        raise DataError(
            "the checkpoint's tokenizer does not say which characters its tokens come from",
            do="Give the checkpoint a tokenizer.json.",
        )
    template: ChatTemplate | None = None
    for record in records:
        sample = _of_kind(record, (Conversation, Completion))
        if isinstance(sample, Completion):
            made = completion_row(sample.prompt, sample.completion, tokenizer, record.where)
        else:
            template = template or ChatTemplate.of(tokenizer, record.where)
            made = chat_row(sample, template, tokenizer, record.where)
        yield Tokenized(made.tokens, made.learned, template.notes if template else ())


def _text(record: Record) -> str:
    text: str = _of_kind(record, Text).text
    require_utf8(text, record.where)
    return text


def _of_kind(record: Record, kind: Any) -> Any:
    sample = sample_of(record)
    if not isinstance(sample, kind):
        raise DataError(
            f"text and conversations in one data set: {str(dict(record.row))[:80]}",
            where=record.where,
            do="All rows must be like the first. Use data.blend for both kinds.",
        )
    return sample
