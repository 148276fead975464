"""Rows of tokens to train on, held in two flat arrays, and the order in which they are taken.

Text (a UTF-8 file, a directory of them, or JSONL with `text`) is packed: documents, each ended by the
end-of-text token, are laid end to end and cut into rows of `sequence_length` targets. JSONL with
`messages` is fine-tuning: one conversation a row, and only the assistant's words are targets.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from precisionctl.errors import DataError
from precisionctl.param import GEMM_ALIGNMENT
from precisionctl.recipe import Train
from precisionctl.trainer.chat import ChatRow, chat_rows

IGNORED = -100
"""The label of a position that is no target: torch's default `ignore_index`."""


DOCUMENTS_AT_ONCE = 256
"""Tokenizers work on many documents in parallel."""


@dataclass(frozen=True)
class Batch:
    """`tokens` and `labels`, int64 `[rows, length]`: `labels[r, i]` follows `tokens[r, i]`, or is IGNORED. `real`,
    bool, is False at padding."""

    tokens: Tensor
    labels: Tensor
    real: Tensor

    @property
    def targets(self) -> int:
        """How many positions count towards the loss."""
        return int((self.labels != IGNORED).sum())

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.tokens.to(device), self.labels.to(device), self.real.to(device))


@dataclass(frozen=True)
class Rows:
    """Row `i` is `tokens[starts[i]:ends[i]]`, where a token is a target if `learned`; rows may share a token."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    padding: int
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def fingerprint(self) -> str:
        """A hash of what is trained on, wherever the file is."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.learned, self.starts, self.ends):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def require_vocabulary(self, size: int) -> None:
        """Raise DataError for a token that a model with `size` of them does not know."""
        largest = max(int(self.tokens.max()), self.padding)
        if largest >= size:
            raise DataError(
                f"the tokenizer makes token {largest}, and the model's last one is {size - 1}",
                do="Give the checkpoint the tokenizer that its model was trained with.",
            )

    def batch(self, indices: Sequence[int]) -> Batch:
        """The rows of these numbers, padded at the right to the longest, rounded up to GEMM_ALIGNMENT."""
        longest = max(int(self.ends[i] - self.starts[i]) for i in indices) - 1
        width = -(-longest // GEMM_ALIGNMENT) * GEMM_ALIGNMENT
        tokens = torch.full((len(indices), width), self.padding)
        labels = torch.full((len(indices), width), IGNORED)
        real = torch.zeros((len(indices), width), dtype=torch.bool)
        for row, i in enumerate(indices):
            here = slice(self.starts[i], self.ends[i])
            ids, learned = torch.from_numpy(self.tokens[here]), torch.from_numpy(self.learned[here])
            tokens[row, : len(ids) - 1] = ids[:-1]
            labels[row, : len(ids) - 1] = ids[1:].long().where(learned[1:], IGNORED)
            real[row, : len(ids) - 1] = True
        return Batch(tokens, labels, real)


class Order:
    """The endless order of rows: each epoch is a permutation of its own, made from `seed` and the epoch."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rows = rows
        self._seed = seed
        self._epoch = -1
        self._permutation: list[int] = []

    def take(self, position: int, count: int) -> list[int]:
        """Row numbers `[position, position + count)` of the order. `position` alone says where a run stands."""
        return [self._row(place) for place in range(position, position + count)]

    def _row(self, place: int) -> int:
        epoch, index = divmod(place, self._rows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._permutation = torch.randperm(self._rows, generator=generator).tolist()
            self._epoch = epoch
        return self._permutation[index]


class Feed:
    """Rows in the order and the batches in which a recipe's training takes them."""

    def __init__(self, rows: Rows, train: Train, device: torch.device) -> None:
        self.rows, self._train, self._device = rows, train, device
        self._order = Order(len(rows), train.seed)

    def batches(self, position: int) -> list[Batch]:
        """The micro-batches of the update that takes its rows from `position` on."""
        numbers = self._order.take(position, self._train.batch_size)
        return list(in_batches(self.rows, numbers, self._train.micro_batch_size, self._device))

    def coming(self, position: int) -> Iterator[tuple[Batch, int]]:
        """The micro-batches of that update and all later ones, each with the targets of its update."""
        for start in count(position, self._train.batch_size):
            batches = self.batches(start)
            targets = sum(batch.targets for batch in batches)
            yield from ((batch, targets) for batch in batches)


def in_batches(rows: Rows, numbers: Iterable[int], size: int, device: torch.device) -> Iterator[Batch]:
    listed = list(numbers)
    for start in range(0, len(listed), size):
        yield rows.batch(listed[start : start + size]).to(device)


def load_rows(path: Path, tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> Rows:
    """The rows of a file or directory. Raises DataError for a path, a text or a row that cannot be used."""
    if path.suffix == ".jsonl" and "messages" in next(_json_rows(path), {}):
        rows, notes = chat_rows(_conversations(path), tokenizer, path)
        return _one_row_each(rows, notes, sequence_length, tokenizer.eos_token_id, path)
    return _packed(_documents(path), tokenizer, sequence_length, path)


def _documents(path: Path) -> Iterator[str]:
    if path.is_dir():
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            if not any(part.startswith(".") for part in file.relative_to(path).parts):
                yield from _documents(file)
    elif path.suffix == ".jsonl":
        for row in _json_rows(path):
            yield _field(row, "text", str, path)
    else:
        yield _text(path)


def _conversations(path: Path) -> Iterator[list[dict[str, Any]]]:
    for row in _json_rows(path):
        messages = _field(row, "messages", list, path)
        if not all(isinstance(message, dict) and "role" in message for message in messages):
            raise DataError(f"a message without a role: {str(messages)[:80]}", where=path)
        yield messages


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text: {error}", where=path, do="Text is any UTF-8 file; rows are .jsonl.") from None
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=path) from None


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"line {number} is not JSON: {error}", where=path) from None
        if not isinstance(row, dict):
            raise DataError(f"line {number} is not a JSON object", where=path)
        yield row


def _field(row: dict[str, Any], key: str, kind: type, path: Path) -> Any:
    if not isinstance(row.get(key), kind):
        raise DataError(
            f"a row without `{key}`: {str(row)[:80]}",
            where=path,
            do='Every row is {"text": ...}, or every row is {"messages": [{"role": ..., "content": ...}, ...]}.',
        )
    return row[key]


def _packed(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int, path: Path) -> Rows:
    """Rows of `length` targets; each row's first token is the last one's last target, so none is lost between."""
    pieces = list(_tokenized(documents, tokenizer))
    tokens = np.concatenate(pieces) if pieces else np.empty(0, np.int32)
    count = (len(tokens) - 1) // length
    if count < 1:
        raise DataError(
            f"{len(tokens)} tokens are less than one row of {length}",
            where=path,
            do="Give more text or a smaller data.sequence_length.",
        )
    starts = np.arange(count, dtype=np.int64) * length
    return Rows(tokens, np.ones(len(tokens), np.bool_), starts, starts + length + 1, tokenizer.eos_token_id)


def _tokenized(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[NDArray[np.int32]]:
    """Each document's tokens, with what the tokenizer puts before it and one end-of-text token behind it."""
    coming = iter(documents)
    while some := list(islice(coming, DOCUMENTS_AT_ONCE)):
        for ids in tokenizer(some, verbose=False)["input_ids"]:
            ended = ids and ids[-1] == tokenizer.eos_token_id
            yield np.asarray(ids if ended else [*ids, tokenizer.eos_token_id], np.int32)


def _one_row_each(rows: Iterable[ChatRow], notes: list[str], length: int, padding: int, path: Path) -> Rows:
    """Conversations cut to `length` targets; those with nothing left to learn are left out, and counted."""
    listed = list(rows)
    cut = [ChatRow(row.tokens[: length + 1], row.learned[: length + 1]) for row in listed]
    kept = [row for row in cut if row.learned[1:].any()]
    if not kept:
        raise DataError("no conversation has a word of the assistant to learn", where=path)
    longer = sum(len(row.tokens) > length + 1 for row in listed)
    if longer:
        notes = [*notes, f"{longer} conversations were cut to {length} tokens"]
    if len(kept) < len(cut):
        notes = [*notes, f"{len(cut) - len(kept)} conversations were left out: nothing in them to learn"]
    ends = np.cumsum([len(row.tokens) for row in kept])
    return Rows(
        np.concatenate([row.tokens for row in kept]),
        np.concatenate([row.learned for row in kept]),
        np.concatenate([[0], ends[:-1]]),
        ends,
        padding,
        tuple(notes),
    )
