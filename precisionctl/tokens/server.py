"""The main function of a tokenizer's process: load a tokenizer, and reply to queries until the client is gone."""

import json
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from precisionctl.errors import DataError, PrecisionctlError
from precisionctl.signals import end_with
from precisionctl.tokens.limits import Limits, hold_to
from precisionctl.tokens.samples import Completion, Conversation
from precisionctl.tokens.wire import IDS, Packet, receive, send

Parts = Sequence[bytes]
PacketFields = Mapping[str, Any]
Answers = Iterator[tuple[PacketFields, Parts]]


def main(parent: int) -> None:
    """Serve the process `parent` on standard input and output, which are closed to all that is called from here."""
    end_with(parent)
    with suppress(OSError):  # if memory runs out, this process is killed before its client
        Path("/proc/self/oom_score_adj").write_text("1000")
    pipe = _Pipe()
    sys.modules["torch"] = None  # type: ignore[assignment]  # not needed: transformers imports in one second, not three
    from precisionctl.tokens import chat, safe_tokenizer

    with open(os.devnull, "r+b") as nothing:
        for stream in (0, 1, 2):  # which libraries use
            os.dup2(nothing.fileno(), stream)
    send(pipe, {})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer: Any = None

    def load(fields: PacketFields, _: Parts) -> Answers:
        nonlocal tokenizer
        tokenizer = safe_tokenizer.load(Path(fields["folder"]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        yield {"begin": tokenizer.bos_token_id, "end": tokenizer.eos_token_id, "size": len(tokenizer)}, []

    def samples(fields: PacketFields, parts: Parts) -> Answers:
        """For each sample the token ids, and whether each is learned. What the template does not print is told of the
        first one."""
        told: set[str] = set()
        for where, part in zip(fields["where"], parts, strict=True):
            sample = json.loads(part)
            notes: tuple[str, ...] = ()
            if "messages" in sample:
                conversation = Conversation(**sample)
                template = chat.ChatTemplate.of(tokenizer, conversation.tools, where)
                made = chat.chat_row(conversation, template, tokenizer, where, told)
                told.update(made.unprinted)
                left_out = (
                    f"the chat template prints no `{key}` of conversations that have it" for key in made.unprinted
                )
                notes = (*template.notes, *left_out)
            else:
                made = chat.completion_row(Completion(**sample), tokenizer, where)
            yield {"notes": notes}, [made.tokens.tobytes(), made.learned.tobytes()]

    def texts(_: PacketFields, parts: Parts) -> Answers:
        """For each text the token ids."""
        made = _tokens(tokenizer, [str(part, "utf-8") for part in parts])
        yield {}, [np.asarray(ids, IDS).tobytes() for ids in made]

    def encode(fields: PacketFields, parts: Parts) -> Answers:
        yield {}, [np.asarray(ids, IDS).tobytes() for ids in _tokens(tokenizer, [str(parts[0], "utf-8")], **fields)]

    def decode(fields: PacketFields, parts: Parts) -> Answers:
        yield {}, [str(tokenizer.decode(np.frombuffer(parts[0], IDS).tolist(), **fields)).encode()]

    def render(fields: PacketFields, parts: Parts) -> Answers:
        chat.ChatTemplate.of(tokenizer, None, "")  # which says it where there is none
        yield {}, [str(tokenizer.apply_chat_template(json.loads(parts[0]), tokenize=False, **fields)).encode()]

    known = {work.__name__: work for work in (load, samples, texts, encode, decode, render)}
    with suppress(EOFError):
        while True:
            _answer(pipe, receive(pipe, sys.maxsize), known)


def _answer(pipe: "_Pipe", query: Packet, known: Mapping[str, Callable[[PacketFields, Parts], Answers]]) -> None:
    """Send one reply for each of the query's limits, or an error in place of the one that failed."""
    fields = dict(query.fields)
    try:
        limits, answers = fields.pop("limits"), known[fields.pop("do")](fields, query.parts)
        for most in limits:
            hold_to(Limits(**most))
            send(pipe, *next(answers))
    except PrecisionctlError as error:
        send(pipe, {"error": {"what": error.what, "where": error.where, "do": error.do}})
    except BaseException as error:  # libraries raise nearly anything, and Rust's panics are not an Exception
        problem = DataError(f"the checkpoint's tokenizer fails: {type(error).__name__}: {error}")
        send(pipe, {"error": {"what": problem.what, "where": "", "do": None}})


def _tokens(tokenizer: Any, texts: list[str], **options: Any) -> list[list[int]]:
    made = tokenizer(texts, verbose=False, return_attention_mask=False, return_token_type_ids=False, **options)
    ids: list[list[int]] = made["input_ids"]
    return ids


class _Pipe:
    """Standard input and output as they were at the start."""

    def __init__(self) -> None:
        self._in, self._out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")

    def read(self, size: int) -> bytes:
        return self._in.read(size)

    def write(self, data: bytes) -> None:
        self._out.write(data)

    def flush(self) -> None:
        self._out.flush()
