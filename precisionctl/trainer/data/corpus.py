"""`tokenize`: data as Megatron's `.bin` and `.idx`, made by all cores; a killed command continues where it was.

Everything is built in `OUT.partial/`, in the order of the data, so that the bytes are the same for any number of
workers. Conversations have a third file, `OUT.learned`, as Megatron's two have no place for it: a byte for each token,
1 if it is to be learned.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from precisionctl.checkpoints.hf_directory.companions import is_tokenizer, read_companions
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.output import Output, disk_problems, lock, open_kept, replace_file, sync
from precisionctl.errors import DataError, OutputError
from precisionctl.sizes import counted
from precisionctl.tokens.tokenizer import Tokenizer, open_tokenizer
from precisionctl.trainer.data.megatron import BIN, ID_TYPES, IDX, LEARNED, with_suffix, write_index
from precisionctl.trainer.data.records import DataSource, Record
from precisionctl.trainer.data.store import cache_key
from precisionctl.trainer.data.tokenize import tokenize
from precisionctl.trainer.stopping import stop_signals

TOKENS_AT_ONCE = 1 << 24
"""Tokens that are written between two entries in the journal."""

_JOURNAL, _LENGTHS, _LOCK = "journal.json", "lengths", "lock"

_MOST_OF_16_BITS = 65500
"""As Megatron's DType.optimal_dtype."""


@dataclass(frozen=True)
class Corpus:
    """How much of some data is tokenized so far: the numbers of documents (or conversations), of tokens, and of tokens
    to be learned (None: all). `key` identifies the data and the tokenizer, and `code` is the type of ids, as in
    ID_TYPES."""

    key: str
    code: int
    documents: int = 0
    tokens: int = 0
    learned: int | None = None
    silent: int = 0
    """Conversations of which nothing is to be learned."""
    notes: Sequence[str] = ()
    signal: str = ""
    """The signal that stopped it; empty if it is complete."""
    written: bool = False
    """Whether all is written, so that some of it may have its name already."""

    def told(self) -> list[str]:
        """The notes, and how many conversations a run leaves out."""
        silent = counted(self.silent, "conversation has", "conversations have")
        return [*self.notes, *([f"{silent} nothing to learn, and no place in `resume`"] if self.silent else [])]

    def as_json(self, out: Path) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "files": [] if self.signal else [str(with_suffix(out, name)) for name in _names(self)],
            "documents": self.documents,
            "tokens": self.tokens,
            "learned": self.learned,
            "ids": np.dtype(ID_TYPES[self.code]).name,
            "stopped": self.signal or None,
            "kept": True if self.signal else None,
            "notes": self.told(),
        }


def make_corpus(
    source: DataSource, out: Path, tokenizer: Path, workers: int, on_text: Callable[[int], None], *, restart: bool
) -> Corpus:
    """Tokenize data as `resume` does, with the tokenizer of a checkpoint or of a directory that has no more, in
    `workers` processes. `on_text` is called with the characters of each further piece of text. `restart` discards what
    an earlier call has left; without it, what was left of the same data is continued.

    Raises OutputError if there are results already, or what is left is of other data, DataError for data that cannot be
    read, DiskProblem.
    """
    partial = Output(out).partial
    if not ((before := _noted(partial)) and before.written):
        _check_free(out)
    if (partial.exists() and not (partial / _LOCK).exists()) or partial.is_symlink():
        raise OutputError(
            "something else is in the place of this command's unfinished output",
            where=partial,
            do="Choose another OUT, or remove it.",
        )
    companions = read_companions(tokenizer)
    if not any(map(is_tokenizer, companions.files)):
        wanted = "--tokenizer takes a checkpoint, or a directory with the files of a tokenizer."
        companions = open_checkpoint(tokenizer, wanted=wanted).companions
    with disk_problems(Output(out)):
        partial.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            file = stack.enter_context(open_kept(partial / _LOCK))
            lock(
                file,
                OutputError("another process is writing this result", where=partial, do="Wait for it, or stop it."),
            )
            try:
                opened = (open_tokenizer(companions, tokenizer, one_core=True) for _ in range(workers))
                tokenizers = [stack.enter_context(one) for one in opened]
                code = 8 if tokenizers[0].size < _MOST_OF_16_BITS else 4
                begun = Corpus(cache_key(source.identity, tokenizers[0]), code, notes=source.notes)
                made = _begin(partial, out, begun, restart)
                if not made.written:
                    made = _write(partial, made, _counting_text(source.records(), on_text), tokenizers)
                if not made.signal:
                    _finish(partial, out, made, source.name)
            except DataError:
                if not ((noted := _noted(partial)) and noted.tokens and noted.learned != 0):  # nothing to continue from
                    shutil.rmtree(partial)
                raise
        return made


def _check_free(out: Path) -> None:
    for suffix in (BIN, IDX, LEARNED):
        if (there := with_suffix(out, suffix)).exists():
            raise OutputError("the result already exists", where=there, do="Choose another OUT, or remove it.")


def _noted(partial: Path) -> Corpus | None:
    """The journal of an earlier command; None if there is none that can be read."""
    with suppress(OSError, ValueError, TypeError):
        return Corpus(**json.loads((partial / _JOURNAL).read_bytes()))
    return None


def _begin(partial: Path, out: Path, begun: Corpus, restart: bool) -> Corpus:
    """The Corpus to continue from: what an earlier command made of the same data, with its files cut back to what its
    journal says; else `begun`, with all files removed. Raises OutputError for what is left of other data, unless it is
    to `restart`."""
    before = None if restart else _noted(partial)
    if before and before.key != begun.key:
        _check_free(out)
        raise OutputError(
            "unfinished output of other data is there, of other files of it, or of another tokenizer",
            where=partial,
            do="Run with --restart to discard it, or choose another OUT.",
        )
    if before and before.written:
        # Each file has either its final name or the partial one
        if all((partial / name).exists() != with_suffix(out, name).exists() for name in _names(before)):
            return before
    elif before:
        learned = {} if before.learned is None else {LEARNED: before.tokens}
        id_size = np.dtype(ID_TYPES[before.code]).itemsize
        sizes = {_LENGTHS: 4 * before.documents, BIN: id_size * before.tokens, **learned}
        with suppress(OSError):  # a file that is missing, as is one that is too short: all is made anew
            if all((partial / name).stat().st_size >= size for name, size in sizes.items()):
                for name, size in sizes.items():
                    os.truncate(partial / name, size)
                return replace(before, signal="")
    _check_free(out)
    for name in (_JOURNAL, _LENGTHS, BIN, LEARNED, IDX):
        (partial / name).unlink(missing_ok=True)
    return begun


def _names(made: Corpus) -> tuple[str, ...]:
    """The files of the result in the order in which they are renamed. The index comes last: without it there is no data
    set."""
    return (BIN, IDX) if made.learned is None else (LEARNED, BIN, IDX)


def _write(partial: Path, made: Corpus, rows: Iterator[Record], tokenizers: Sequence[Tokenizer]) -> Corpus:
    """Append what is not made yet."""
    dtype = np.dtype(ID_TYPES[made.code])
    largest, noted = np.iinfo(dtype).max, made.tokens
    with ExitStack() as stack:
        received = stack.enter_context(stop_signals())
        lengths, ids, learned = (stack.enter_context(open(partial / name, "ab")) for name in (_LENGTHS, BIN, LEARNED))

        def note() -> None:
            for file in (lengths, ids, learned):
                file.flush()
                os.fsync(file.fileno())
            replace_file(partial / _JOURNAL, json.dumps(asdict(made)))

        samples = stack.enter_context(closing(tokenize(rows, tokenizers, made.documents)))
        for sample in samples:
            if int(sample.tokens.max(initial=0)) > largest:
                raise DataError(f"the tokenizer makes token {sample.tokens.max()}, beyond those that it says it has")
            ids.write(sample.tokens.astype(dtype).data)
            lengths.write(struct.pack("<i", len(sample.tokens)))
            to_learn, silent = made.learned, made.silent
            if sample.learned is not None:
                learned.write(np.ascontiguousarray(sample.learned).data)
                to_learn = (made.learned or 0) + int(sample.learned.sum())
                silent += not sample.learned[1:].any()  # a first token is no target
            made = replace(
                made,
                documents=made.documents + 1,
                tokens=made.tokens + len(sample.tokens),
                learned=to_learn,
                silent=silent,
                notes=[*dict.fromkeys((*made.notes, *sample.notes))] if sample.notes else made.notes,
            )
            if received:
                made = replace(made, signal=received[0].name)
                break
            if made.tokens - noted >= TOKENS_AT_ONCE:
                note()
                noted = made.tokens
        note()
    return made


def _finish(partial: Path, out: Path, made: Corpus, data: str) -> None:
    """Write the index, and give all files their names."""
    if not made.tokens:
        raise DataError("there is no text in it, and no row", where=data)
    if made.learned == 0:
        do = "Is there a message of the assistant, and does the chat template mark its words ({% generation %})?"
        raise DataError("no conversation has text of the assistant to learn", where=data, do=do)
    if not made.written:
        write_index(partial / IDX, np.memmap(partial / _LENGTHS, "<i4", "r"), made.code)
        sync(partial / IDX)
        replace_file(partial / _JOURNAL, json.dumps(asdict(replace(made, written=True))))
    for name in _names(made):
        if (partial / name).exists():
            (partial / name).rename(with_suffix(out, name))
    sync(out.absolute().parent)
    shutil.rmtree(partial)


def _counting_text(rows: Iterator[Record], on_text: Callable[[int], None]) -> Iterator[Record]:
    for record in rows:
        on_text(sum(len(str(value)) for value in record.row.values()))
        yield record
