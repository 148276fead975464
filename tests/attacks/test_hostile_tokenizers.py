"""Tokenizers and chat templates of strangers: each takes what it may of time and memory, reads its own files alone, and
then is one clear error."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pico
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer as Words
from tokenizers import models, pre_tokenizers
from tokenizing import files_of
from transformers import PreTrainedTokenizerFast

from precisionctl.cli import main
from precisionctl.errors import DataError
from precisionctl.tokens import limits, process
from precisionctl.tokens.limits import Limits
from precisionctl.tokens.process import Process
from precisionctl.tokens.tokenizer import Piece, Tokenizer

CHAT = Piece("chats.jsonl, line 1", json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode(), 1)
MB = 1 << 20


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WORKING", Limits(1.0, 256 * MB))
    monkeypatch.setattr(limits, "LOADING", Limits(10.0, 512 * MB))


@pytest.fixture
def bounded() -> Iterator[None]:
    """What happens takes this process, and all that it starts, little time and memory. Memory of children is the most
    that any had so far, so it is held against the largest bound here."""
    begun, own = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.monotonic() - begun < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - own < 200 << 10
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 1500 << 10


@cache
def sound() -> Mapping[str, bytes]:
    words = Words(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{{ messages[0].content }}"
    return files_of(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", chat_template=template))


def tokenizer(**changes: Any) -> Tokenizer:
    """A sound one with other parts of tokenizer.json."""
    return with_file("tokenizer.json", **changes)


def with_file(name: str, **changes: Any) -> Tokenizer:
    """A sound one with other keys in one of its JSON files."""
    return Tokenizer({**sound(), name: json.dumps({**json.loads(sound().get(name, b"{}")), **changes}).encode()})


def with_template(template: str) -> Tokenizer:
    return Tokenizer({**sound(), "chat_template.jinja": template.encode()})


NESTED = "{% set n = namespace(a=[], b=[]) %}{% for i in range(26) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}"
LATE = "takes longer than 1 s|ended by SIGXCPU"
LARGE = "memory|refuses"
TEMPLATES = {
    "lists in lists that are compared": (NESTED + "{% endfor %}{{ n.a == n.b }}", LATE),
    "loops in loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", LATE),
    "a number without end": ("{{ 7 ** (7 ** 9) }}", LATE),
    "a search that tries everything": ("{{ ('a' * 99999) is in ('ab' * 9) }}{{ ('ab' * 9999999)|wordwrap(1)|length }}", ""),
    "text that doubles": (
        "{% set n = namespace(a='ab') %}{% for i in range(40) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
        LARGE,
    ),
    "more text than a conversation has": ("{{ 'a ' * 9000000 }}", "answers with|memory|takes longer"),
    "itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses"),
    "parentheses in parentheses": ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "refuses"),
    "lists in lists": ("{{ " + "[" * 300 + "]" * 300 + " }}", "refuses"),
}
