"""Tokens in memory-mapped files, cached by data files and tokenizer, and written atomically."""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from precisionctl.checkpoints.output import open_kept, replace_file
from precisionctl.errors import DataError, DiskProblem
from precisionctl.tokens.tokenizer import Tokenizer
from precisionctl.trainer.data.records import DataSource
from precisionctl.trainer.data.tokenize import Tokenized, tokenize

VERSION = 5
"""The version of a folder's format; tokens of another version are made anew."""

OnTokens = Callable[[int], None]
"""Called every CALL_EVERY tokens with the number of tokens so far."""

CALL_EVERY = 10_000_000

COMMITS = "commits.json"
"""The commits that names of data sets on the Hub stand for, beside the folders of tokens."""

ABOUT, TOKENS, LEARNED, ENDS, FIRST = "about.json", "tokens.bin", "learned.bin", "ends.bin", "first_target.bin"


@dataclass(frozen=True)
class About:
    """What is known of tokens without reading them: their number, the number of conversations (None for text), the
    largest token, a hash of all, the end-of-text token (also used for padding), and notes for the user."""

    tokens: int
    samples: int | None
    largest: int
    digest: str
    end: int
    notes: Sequence[str]


@dataclass(frozen=True)
class Samples:
    """The conversations in some tokens: conversation `i` ends before token `ends[i]`, and the first target in it is its
    token number `first_target[i]`, both int64. `learned`, bool, says for each token whether it is to be learned."""

    learned: NDArray[np.bool_]
    ends: NDArray[np.int64]
    first_target: NDArray[np.int64]


@dataclass(frozen=True)
class Tokens:
    """All tokens of some data; `samples` are the conversations in them, None for text."""

    ids: NDArray[np.integer[Any]]
    about: About
    samples: Samples | None = None


def tokenized(source: DataSource, tokenizer: Tokenizer, cache: Path | None, on_tokens: OnTokens) -> Tokens:
    """The tokens of some data, from `cache` if they are there. Raises DataError for data that cannot be read,
    DiskProblem for a cache that cannot be written."""

    def build(folder: Path) -> About:
        return _write(folder, tokenize(source.records(), [tokenizer]), tokenizer.end, on_tokens)

    with cached_folder(cache, cache_key(source.identity, tokenizer), build) as (folder, about):
        about = replace(about, notes=[*source.notes, *about.notes])
        ids = mapped(folder / TOKENS, np.dtype(np.int32), about.tokens)
        if about.samples is None:
            return Tokens(ids, about)
        learned = mapped(folder / LEARNED, np.dtype(np.bool_), about.tokens)
        ends, first = (mapped(folder / name, np.dtype(np.int64), about.samples) for name in (ENDS, FIRST))
        return Tokens(ids, about, Samples(learned, ends, first))


def cache_key(identity: object, tokenizer: Tokenizer) -> str:
    """A key for the tokens that a tokenizer makes of the data with an `identity`, JSON."""
    return hashlib.sha256(json.dumps([VERSION, tokenizer.key, identity]).encode()).hexdigest()[:32]


class FileStats(NamedTuple):
    """The identity of a file of data: its `name`, which decides how it is read, and the `path`, bytes and time of what
    it links to."""

    name: str
    path: str
    size: int
    changed: int


def stats_of(files: Sequence[Path]) -> list[FileStats]:
    """The identity of files. Raises DataError if one is missing."""
    try:
        stats = [(file, file.resolve(), file.stat()) for file in files]
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=error.filename) from None
    return [FileStats(file.name, str(path), stat.st_size, stat.st_mtime_ns) for file, path, stat in stats]


def known_commit(cache: Path | None, name: str, ask: Callable[[], str]) -> str:
    """The commit of a name on the Hub: what `ask` returned when it was first called for this `cache`, so that all
    ranks, and a run that continues, use the same one. Raises DiskProblem, and what `ask` raises."""
    if cache is None:
        return ask()
    file = cache / COMMITS
    with _exclusive(cache, f"{COMMITS}.lock"):
        try:
            commits = json.loads(file.read_bytes()) if file.exists() else {}
            known = commits.get(name)
        except (ValueError, AttributeError) as error:
            raise _damaged(file, str(error)) from None
        if not isinstance(known, str):
            known = ask()
            replace_file(file, json.dumps(commits | {name: known}, indent=1))
        return known


@contextmanager
def cached_folder(cache: Path | None, key: str, build: Callable[[Path], About]) -> Iterator[tuple[Path, About]]:
    """The folder `key` in `cache`. If it is not there, one process makes it with `build` while others wait; it is
    renamed when complete.

    Without a cache the folder is temporary and removed afterwards; what was memory-mapped stays valid.
    """
    with ExitStack() as stack:
        place = cache or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = place / key
        with _exclusive(place, f"{key}.lock"):
            if not folder.is_dir():
                _make(folder, build)
        try:
            about = About(**json.loads((folder / ABOUT).read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise _damaged(folder, str(error)) from None
        yield folder, about


@contextmanager
def _exclusive(place: Path, name: str) -> Iterator[None]:
    """A context that one process at a time enters for a folder of tokens. Raises DiskProblem for what the system
    raises."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        with open_kept(place / name) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise DiskProblem(
            f"the tokens cannot be kept: {error.strerror}", where=place, do="Make room, or choose a data.cache."
        ) from None


def _make(folder: Path, build: Callable[[Path], About]) -> None:
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a kill
    partial.mkdir()
    try:
        about = build(partial)
    except DataError:
        shutil.rmtree(partial)
        raise
    (partial / ABOUT).write_text(json.dumps(asdict(about), indent=1))
    for file in partial.iterdir():
        with open(file, "rb") as written:
            os.fsync(written)
    partial.rename(folder)


def _write(folder: Path, samples: Iterator[Tokenized], end: int, on_tokens: OnTokens) -> About:
    """Write tokens as they come. The hash covers everything that decides what is trained on."""
    names = (TOKENS, LEARNED, ENDS, FIRST)
    digests = {name: hashlib.sha256() for name in names}
    count, number, largest, learns_all = 0, 0, 0, True
    notes: dict[str, None] = {}
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / name, "wb")) for name in names}

        def put(name: str, values: NDArray[Any]) -> None:
            files[name].write(values.data)
            digests[name].update(values.data)

        for sample in samples:
            put(TOKENS, np.ascontiguousarray(sample.tokens, np.int32))
            before, count = count, count + len(sample.tokens)
            number += 1
            notes |= dict.fromkeys(sample.notes)
            if count // CALL_EVERY > before // CALL_EVERY:
                on_tokens(count)
            largest = max(largest, int(sample.tokens.max(initial=0)))
            if sample.learned is not None:
                learns_all = False
                targets = np.flatnonzero(sample.learned[1:])
                put(LEARNED, np.ascontiguousarray(sample.learned))
                put(ENDS, np.asarray([count], np.int64))
                put(FIRST, np.asarray([targets[0] + 1 if len(targets) else len(sample.tokens)], np.int64))
    for name in names[1:] if learns_all else ():
        (folder / name).unlink()
    whole = hashlib.sha256(b"".join(digests[name].digest() for name in names))
    return About(count, None if learns_all else number, largest, whole.hexdigest(), end, [*notes])


def mapped(file: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """A file of `count` values. Raises DataError if it has another number."""
    if not (file.is_file() and file.stat().st_size == count * dtype.itemsize):
        raise _damaged(file, f"not {count} of {dtype}")
    return np.memmap(file, dtype, "r") if count else np.empty(0, dtype)


def _damaged(where: Path, what: str) -> DataError:
    return DataError(f"damaged: {what}", where=where, do="Remove the folder that it is in; it is made again.")
