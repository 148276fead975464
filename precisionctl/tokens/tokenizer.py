"""Tokenizer: a checkpoint's own tokenizer and chat template, running in a separate process.

The process gets only the companion files that transformers reads a tokenizer from, and its replies are checked.
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
from precisionctl.errors import DataError, require_package
from precisionctl.sizes import size
from precisionctl.tokens.limits import Limits, to_load, to_tokenize
from precisionctl.tokens.process import Ended, Process
from precisionctl.tokens.samples import SPOKEN
from precisionctl.tokens.wire import IDS, Packet
from precisionctl.untrusted.safe_files import LARGEST

_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "vocab.*",
    "merges.txt",
    "*.model",
    "tokenizer.model.*",
    "*.tiktoken",
    "tekken.json",
)
"""The files that transformers reads a tokenizer from. There is no code among them."""

_WITH_TOKENS = ("tokenizer.json", "vocab.*", "*.model", "tokenizer.model.*", "*.tiktoken", "tekken.json")
"""Those that have the tokens. Without any of them transformers makes a tokenizer that knows no word."""

_PACKAGES = ("transformers", "tokenizers")

_FEW, _MANY = 1 << 16, 32
"""Most tokens of a text: a constant, plus a number for each byte. A tokenizer makes at most one token of a byte, but
Unicode normalisation makes up to 18 characters of one, and a template adds text to a conversation. The limit protects
the disk that tokens are written to."""

_MORE = 1 + len(SPOKEN)
"""Renders of a conversation without `tools`, or a key that the template may not print."""

_DO = "Compare the checkpoint's tokenizer files and chat template with those of the model that it comes from."
_FOR_LARGE = "Give it as several documents: a tokenizer takes some 150 bytes of memory for each byte of one."
_LARGE = 16 << 20


class TextPiece(NamedTuple):
    """Something to tokenize, and where it is from: a text in UTF-8, or the fields of a sample in JSON with the number
    of its messages."""

    where: str
    content: bytes
    messages: int = 0


class TokenizedSample(NamedTuple):
    """Token ids, int32, and whether each is to be learned, bool, both `[tokens]`; and notes for the user."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]
    notes: tuple[str, ...]


class Tokenizer:
    """transformers' tokenizer of some files, in a process that is started when it is first needed.

    Raises EnvironmentProblem without transformers. All methods but `close` raise DataError: for files that make no
    tokenizer, for one that takes too much time or memory, and for text that it refuses.
    """

    def __init__(self, files: Mapping[str, bytes], *, path: Path | None = None, one_core: bool = False) -> None:
        """With `one_core` the process uses no more, for several of them beside one another."""
        require_package("transformers", "train", "text")
        self._files = {name: files[name] for name in sorted(files) if any(fnmatchcase(name, each) for each in _FILES)}
        self._process: Process | None = None
        self._known: _Known | None = None
        self._one_core, self._path = one_core, path

    @property
    def key(self) -> str:
        """A hash of files and library versions; equal keys make equal tokens."""
        digest = hashlib.sha256(repr([importlib.metadata.version(package) for package in _PACKAGES]).encode())
        for name, content in self._files.items():
            digest.update(f"{name} {len(content)} ".encode() + content)
        return digest.hexdigest()

    @property
    def is_there(self) -> bool:
        """Whether the files have any tokens."""
        return any(fnmatchcase(name, each) for name in self._files for each in _WITH_TOKENS)

    @property
    def begin(self) -> int | None:
        """The token that texts begin with, if there is one."""
        return self._loads().begin

    @property
    def end(self) -> int:
        """The end-of-text token."""
        return self._loads().end

    @property
    def size(self) -> int:
        """The number of tokens that it knows, added ones included."""
        return self._loads().size

    def _loads(self) -> "_Known":
        if self._known is None:
            self.check()
        assert self._known is not None
        return self._known

    def check(self) -> None:
        """Start the process and load the files, unless that is done."""
        if self._process is None or not self._process.runs:
            self._known = self._loaded()

    def texts(self, pieces: Sequence[TextPiece]) -> list[NDArray[np.int32]]:
        """The tokens of each text, int32 `[tokens]`, with the tokenizer's special tokens."""
        where = pieces[0].where if len(pieces) == 1 else f"{pieces[0].where} to {pieces[-1].where}"
        nbytes = sum(len(piece.content) for piece in pieces)
        query = _Query(where, to_tokenize(nbytes), _room(nbytes), _FOR_LARGE if nbytes > _LARGE else _DO)
        (reply,) = self._answers("texts", {}, [piece.content for piece in pieces], [query])
        return [_ids(part, where) for part in reply.parts]

    def samples(self, pieces: Sequence[TextPiece]) -> list[TokenizedSample]:
        """The tokens of conversations, by the chat template, and of completions."""
        queries = [
            _Query(piece.where, to_tokenize(len(piece.content), 2 * piece.messages + _MORE), _room(len(piece.content)))
            for piece in pieces
        ]
        fields = {"where": [piece.where for piece in pieces]}
        replies = self._answers("samples", fields, [piece.content for piece in pieces], queries)
        found = []
        for reply, piece in zip(replies, pieces, strict=True):
            tokens, learned = reply.parts
            ids, notes = _ids(tokens, piece.where), tuple(reply.fields["notes"])
            found.append(TokenizedSample(ids, np.frombuffer(learned, np.bool_), notes))
        return found

    def encode(self, text: str, **options: bool) -> list[int]:
        """The tokens of a text, with options of transformers' tokenizers."""
        content = text.encode()
        query = _Query("", to_tokenize(len(content)), _room(len(content)))
        (reply,) = self._answers("encode", options, [content], [query])
        ids: list[int] = _ids(reply.parts[0], "").tolist()
        return ids

    def decode(self, ids: Sequence[int], **options: bool) -> str:
        """The text of token ids, with options of transformers' tokenizers."""
        query = _Query("", to_tokenize(4 * len(ids)), _room(4 * len(ids)))
        (reply,) = self._answers("decode", options, [np.asarray(ids, IDS).tobytes()], [query])
        return str(reply.parts[0], "utf-8")

    def render(self, messages: Sequence[Mapping[str, Any]], **options: bool) -> str:
        """A conversation as text, with options of transformers' `apply_chat_template`."""
        content = json.dumps(messages).encode()
        query = _Query("", to_tokenize(len(content)), _room(len(content)))
        (reply,) = self._answers("render", options, [content], [query])
        return str(reply.parts[0], "utf-8")

    def close(self) -> None:
        """End the process, if it runs."""
        if self._process:
            self._process.close()
            self._process = None

    def _loaded(self) -> "_Known":
        """Start the process and load the files."""
        nbytes, named = sum(map(len, self._files.values())), ", ".join(self._files)
        do = (
            "Copy its files (tokenizer.json, tokenizer_config.json, ...) from the model that it belongs to, to where "
            "config.json is; in a Megatron checkpoint that is precisionctl/hf. Or give a --reference that has them."
        )
        if not self.is_there:
            raise DataError("the checkpoint has no tokenizer", where=self._path or named, do=do)
        if nbytes > LARGEST:
            raise DataError(
                f"the tokenizer's files have {size(nbytes)}, more than any known tokenizer", where=named, do=do
            )
        process = Process(one_core=self._one_core)
        try:
            with tempfile.TemporaryDirectory() as folder:
                for name, content in self._files.items():
                    file = Path(folder) / name
                    file.parent.mkdir(exist_ok=True)
                    file.write_bytes(content)
                query = _Query(named, to_load(nbytes), 0, do)
                (reply,) = _fetched(process, {"do": "load", "folder": folder}, [], [query])
            begin, end = reply.fields["begin"], reply.fields["end"]
            for token in (end, *([] if begin is None else [begin])):
                if not (isinstance(token, int) and 0 <= token <= _LARGEST_ID):
                    raise DataError(
                        f"the checkpoint's tokenizer begins or ends texts with {token}", where=named, do=_DO
                    )
        except BaseException:
            process.close()
            raise
        self._process = process
        return _Known(begin, end, int(reply.fields["size"]))

    def _answers(
        self, do: str, fields: Mapping[str, Any], parts: Sequence[bytes], queries: "Sequence[_Query]"
    ) -> Sequence[Packet]:
        self.check()
        assert self._process
        return _fetched(self._process, {**fields, "do": do}, parts, queries)


class _Known(NamedTuple):
    """The tokens that texts begin and end with, and the number of tokens."""

    begin: int | None
    end: int
    size: int


class _Query(NamedTuple):
    """One reply that is asked for: where its subject comes from, for errors; its limits; the most bytes that it may
    have; and the advice if it fails."""

    where: str
    limits: Limits
    most: int
    do: str = _DO


@contextmanager
def open_tokenizer(companions: Companions, path: Path | None, *, one_core: bool = False) -> Iterator[Tokenizer]:
    """A context with the tokenizer of the checkpoint at `path`, which errors name, and at whose end its process
    ends."""
    tokenizer = Tokenizer(companions.files, path=path, one_core=one_core)
    try:
        yield tokenizer
    finally:
        tokenizer.close()


def _fetched(
    process: Process, fields: Mapping[str, Any], parts: Sequence[bytes], queries: Sequence[_Query]
) -> Sequence[Packet]:
    """The replies of a process to queries. Raises DataError if it fails on one, or ends."""
    replies: list[Packet] = []
    try:
        process.ask(fields, parts, [query.limits for query in queries])
        for query in queries:
            replies.append(process.answer(query.limits, query.most))
            if "error" in replies[-1].fields:
                error = replies[-1].fields["error"]
                do = query.do if error["do"] is None else error["do"]
                raise DataError(error["what"], where=error["where"] or query.where, do=do)
    except Ended as problem:
        query = queries[len(replies)]
        raise DataError(
            f"the checkpoint's tokenizer or chat template {problem}", where=query.where, do=query.do
        ) from None
    return replies


_LARGEST_ID = int(np.iinfo(np.int32).max)


def _room(nbytes: int) -> int:
    """Most bytes of a reply for a text of this size: an id for each token, and whether it is learned."""
    return (IDS.itemsize + 1) * (_FEW + _MANY * nbytes)


def _ids(part: bytes, where: str) -> NDArray[np.int32]:
    ids = np.frombuffer(part, IDS)
    if ids.max(initial=0) > _LARGEST_ID:
        raise DataError(f"the checkpoint's tokenizer makes token {ids.max()}", where=where, do=_DO)
    return ids.astype(np.int32)
