"""The checkpoint's own tokenizer and chat template, at work in a process of its own.

Of the files that travel with a checkpoint it gets those that transformers reads a tokenizer from, and what it answers
is looked at before it is believed.
"""

import hashlib
import importlib.metadata
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from precisionctl.checkpoints.base import Companions
from precisionctl.errors import DataError
from precisionctl.tokens.limits import Limits, to_load, to_tokenize
from precisionctl.tokens.process import Ended, Process
from precisionctl.tokens.wire import IDS, Said
from precisionctl.untrusted.safe_files import LARGEST

_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.*",
    "merges.txt",
    "*.model",
    "tokenizer.model.*",
    "*.tiktoken",
    "tekken.json",
)
"""What transformers reads a tokenizer from. Code is not among it, nor anything that is large."""

_PACKAGES = ("transformers", "tokenizers")

_FEW, _MANY = 1 << 16, 32
"""Tokens that any text may have, and tokens of each of its bytes. A tokenizer makes at most one for a byte, or for what
Unicode's compatibility forms make of it, 18 letters for one; of a conversation a template may make more text than is in
it. It is the disk that they go to."""

_DO = "Compare the checkpoint's tokenizer files and chat template with those of the model that it comes from."
_FOR_LARGE = "Give it as several documents: a tokenizer takes some 150 bytes of memory for each byte of one."
_LARGE = 16 << 20


class TextPiece(NamedTuple):
    """Something to tokenize: a text in UTF-8, or the fields of a sample in JSON, of so many messages; and where it
    is."""

    where: str
    content: bytes
    messages: int = 0


class TokenizedSample(NamedTuple):
    """Token ids, int32, and whether each is to be learned, bool, both `[tokens]`; and what there is to say."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]
    notes: tuple[str, ...]


class Tokenizer:
    """transformers' tokenizer of some files, in a process that begins when it is first asked.

    Whatever asks it raises DataError: for files that make no tokenizer, for one that takes too much time or memory, and
    for what it refuses.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = {name: files[name] for name in sorted(files) if any(fnmatchcase(name, each) for each in _FILES)}
        self._process: Process | None = None
        self._end: int | None = None

    @property
    def key(self) -> str:
        """Equal where the same text makes the same tokens."""
        digest = hashlib.sha256(repr([importlib.metadata.version(package) for package in _PACKAGES]).encode())
        for name, content in self._files.items():
            digest.update(f"{name} {len(content)} ".encode() + content)
        return digest.hexdigest()

    @property
    def end(self) -> int:
        """The end-of-text token."""
        if self._end is None:
            self.check()
        assert self._end is not None
        return self._end

    def check(self) -> None:
        """Begin and load the files, where that is not done."""
        if self._process is None or not self._process.runs:
            self._end = self._loaded()

    def texts(self, pieces: Sequence[TextPiece]) -> list[NDArray[np.int32]]:
        """The tokens of each text, int32 `[tokens]`, with what the tokenizer puts around it."""
        where = pieces[0].where if len(pieces) == 1 else f"{pieces[0].where} to {pieces[-1].where}"
        size = sum(len(piece.content) for piece in pieces)
        ask = _Ask(where, to_tokenize(size), _room(size), _FOR_LARGE if size > _LARGE else _DO)
        (said,) = self._answers("texts", {}, [piece.content for piece in pieces], [ask])
        return [_ids(part, where) for part in said.parts]

    def samples(self, pieces: Sequence[TextPiece]) -> list[TokenizedSample]:
        """Conversations and completions, those through the chat template; of each its row."""
        asks = [
            _Ask(piece.where, to_tokenize(len(piece.content), 2 * piece.messages), _room(len(piece.content)))
            for piece in pieces
        ]
        words = {"where": [piece.where for piece in pieces]}
        said = self._answers("samples", words, [piece.content for piece in pieces], asks)
        return [_tokenized_sample(each, piece.where) for each, piece in zip(said, pieces, strict=True)]

    def encode(self, text: str, **options: bool) -> list[int]:
        """The tokens of a text, with transformers' options."""
        content = text.encode()
        ask = _Ask("", to_tokenize(len(content)), _room(len(content)))
        (said,) = self._answers("encode", options, [content], [ask])
        ids: list[int] = _ids(said.parts[0], "").tolist()
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        ask = _Ask("", to_tokenize(4 * len(ids)), _room(4 * len(ids)))
        (said,) = self._answers("decode", {}, [np.asarray(ids, IDS).tobytes()], [ask])
        return str(said.parts[0], "utf-8")

    def render(self, messages: Sequence[Mapping[str, Any]], **options: bool) -> str:
        """A conversation as text, with options of transformers' `apply_chat_template`."""
        content = json.dumps(messages).encode()
        ask = _Ask("", to_tokenize(len(content)), _room(len(content)))
        (said,) = self._answers("render", options, [content], [ask])
        return str(said.parts[0], "utf-8")

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process:
            self._process.close()
            self._process = None

    def _loaded(self) -> int:
        """Begin, and load the files. The end-of-text token."""
        size, named = sum(map(len, self._files.values())), ", ".join(self._files) or "no tokenizer files"
        do = "Put its files beside config.json, which in a Megatron checkpoint is in precisionctl/hf."
        if size > LARGEST:
            raise DataError(f"a tokenizer of {size >> 20} MB, as none is", where=named, do=do)
        process = Process()
        try:
            with tempfile.TemporaryDirectory() as folder:
                for name, content in self._files.items():
                    (Path(folder) / name).write_bytes(content)
                ask = _Ask(named, to_load(size), 0, do)
                (said,) = _fetched(process, {"do": "load", "folder": folder}, [], [ask])
            end: int = said.words["end"]
            if not 0 <= end <= _LARGEST_ID:
                raise DataError(f"the checkpoint's end-of-text token is {end}", where=named, do=_DO)
        except BaseException:
            process.close()
            raise
        self._process = process
        return end

    def _answers(
        self, do: str, words: Mapping[str, Any], parts: Sequence[bytes], asks: "Sequence[_Ask]"
    ) -> Sequence[Said]:
        self.check()
        assert self._process
        return _fetched(self._process, {**words, "do": do}, parts, asks)


class _Ask(NamedTuple):
    """Where something is that is asked about, what the answer may take, how many bytes it may have, and what to `do`
    where there is none."""

    where: str
    limits: Limits
    most: int
    do: str = _DO


@contextmanager
def open_tokenizer(companions: Companions) -> Iterator[Tokenizer]:
    """The tokenizer of a checkpoint, whose process ends with the block."""
    tokenizer = Tokenizer(companions.files)
    try:
        yield tokenizer
    finally:
        tokenizer.close()


def _fetched(
    process: Process, words: Mapping[str, Any], parts: Sequence[bytes], asks: Sequence[_Ask]
) -> Sequence[Said]:
    """The answers of a process. Raises DataError where there is something wrong with one."""
    said: list[Said] = []
    try:
        process.ask(words, parts, [ask.limits for ask in asks])
        for ask in asks:
            said.append(process.answer(ask.limits, ask.most))
            if "error" in said[-1].words:
                error = said[-1].words["error"]
                raise DataError(error["what"], where=error["where"] or ask.where, do=error["do"] or ask.do)
    except Ended as problem:
        ask = asks[len(said)]
        raise DataError(f"the checkpoint's tokenizer or chat template {problem}", where=ask.where, do=ask.do) from None
    return said


_LARGEST_ID = int(np.iinfo(np.int32).max)


def _room(nbytes: int) -> int:
    """Bytes of an answer about so many: of each token its id, and whether it is learned."""
    return (IDS.itemsize + 1) * (_FEW + _MANY * nbytes)


def _ids(part: bytes, where: str) -> NDArray[np.int32]:
    ids = np.frombuffer(part, IDS)
    if ids.max(initial=0) > _LARGEST_ID:
        raise DataError(f"the checkpoint's tokenizer makes token {ids.max()}", where=where, do=_DO)
    return ids.astype(np.int32)


def _tokenized_sample(said: Said, where: str) -> TokenizedSample:
    tokens, learned = said.parts
    return TokenizedSample(_ids(tokens, where), np.frombuffer(learned, np.bool_), tuple(said.words["notes"]))
