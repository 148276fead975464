"""What a tokenizer's process does: it loads one, and answers until nobody asks any more."""

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from precisionctl.errors import DataError, PrecisionctlError
from precisionctl.tokens.limits import Limits, hold_to
from precisionctl.tokens.samples import Completion, Conversation
from precisionctl.tokens.wire import IDS, Said, receive, send

Parts = Sequence[bytes]
Words = Mapping[str, Any]
Answers = Iterator[tuple[Words, Parts]]

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Speak on standard input and output, which nothing that is called from here gets to see."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which whoever asks hears as well
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError):  # where memory runs out, this process goes before the one that asks
        Path("/proc/self/oom_score_adj").write_text("1000")
    pipe = _Pipe()
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers does without: one second instead of three
    from precisionctl.tokens import chat, loads

    _silence()
    send(pipe, {})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer: Any = None

    def load(words: Words, _: Parts) -> Answers:
        nonlocal tokenizer
        tokenizer = loads.load(Path(words["folder"]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        yield {"end": tokenizer.eos_token_id}, []

    def samples(words: Words, parts: Parts) -> Answers:
        """Of each a token's id and whether it is learned."""
        template: chat.ChatTemplate | None = None
        for where, part in zip(words["where"], parts, strict=True):
            sample = json.loads(part)
            if "messages" in sample:
                template = template or chat.ChatTemplate.of(tokenizer, where)
                made = chat.chat_row(Conversation(**sample), template, tokenizer, where)
            else:
                made = chat.completion_row(Completion(**sample), tokenizer, where)
            notes = template.notes if template else ()
            yield {"notes": notes}, [made.tokens.tobytes(), made.learned.tobytes()]

    def texts(_: Words, parts: Parts) -> Answers:
        """Of each the tokens, of which none is learned more than others."""
        made = _tokens(tokenizer, [str(part, "utf-8") for part in parts])
        yield {}, [np.asarray(ids, IDS).tobytes() for ids in made]

    def encode(words: Words, parts: Parts) -> Answers:
        yield {}, [np.asarray(ids, IDS).tobytes() for ids in _tokens(tokenizer, [str(parts[0], "utf-8")], **words)]

    def decode(_: Words, parts: Parts) -> Answers:
        yield {}, [str(tokenizer.decode(np.frombuffer(parts[0], IDS).tolist())).encode()]

    def render(words: Words, parts: Parts) -> Answers:
        yield {}, [str(tokenizer.apply_chat_template(json.loads(parts[0]), tokenize=False, **words)).encode()]

    known = {work.__name__: work for work in (load, samples, texts, encode, decode, render)}
    with suppress(EOFError):
        while True:
            _answer(pipe, receive(pipe, sys.maxsize), known)


def _answer(pipe: "_Pipe", asked: Said, known: Mapping[str, Callable[[Words, Parts], Answers]]) -> None:
    """Say as many answers as there are limits, or after fewer what went wrong."""
    words = dict(asked.words)
    try:
        limits, answers = words.pop("limits"), known[words.pop("do")](words, asked.parts)
        for most in limits:
            hold_to(Limits(**most))
            send(pipe, *next(answers))
    except PrecisionctlError as error:
        send(pipe, {"error": {"what": error.what, "where": error.where, "do": error.do}})
    except BaseException as error:  # the libraries raise nearly anything, and Rust's panics are no Exception
        problem = DataError(f"the checkpoint's tokenizer fails: {type(error).__name__}: {error}")
        send(pipe, {"error": {"what": problem.what, "where": "", "do": ""}})


def _tokens(tokenizer: Any, texts: list[str], **options: Any) -> list[list[int]]:
    made = tokenizer(texts, verbose=False, return_attention_mask=False, return_token_type_ids=False, **options)
    ids: list[list[int]] = made["input_ids"]
    return ids


def _silence() -> None:
    """Turn what libraries read and print to nothing."""
    with open(os.devnull, "r+b") as nothing:
        for stream in (0, 1, 2):
            os.dup2(nothing.fileno(), stream)


class _Pipe:
    """Standard input and output as they were at the start."""

    def __init__(self) -> None:
        self._asked, self._said = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")

    def read(self, size: int) -> bytes:
        return self._asked.read(size)

    def write(self, data: bytes) -> None:
        self._said.write(data)

    def flush(self) -> None:
        self._said.flush()
