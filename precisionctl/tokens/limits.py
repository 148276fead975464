"""Limits on time and memory of a tokenizer's process, which the kernel enforces."""

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/statm")


@dataclass(frozen=True)
class Limits:
    """Seconds until the reply must be there, and bytes of memory beyond what is already in use."""

    seconds: float
    nbytes: int


LOADING = Limits(120.0, 1 << 30)
"""To load small files. For a SentencePiece model transformers computes the merges, which takes up to half a minute."""

WORKING = Limits(10.0, 1 << 30)
"""To tokenize a short text or conversation."""


def to_load(nbytes: int) -> Limits:
    """The limits to load files of this size; a BPE of 262,144 tokens, 23 MB, takes 0.4 GB and 2 s."""
    return Limits(LOADING.seconds + 5e-7 * nbytes, LOADING.nbytes + 32 * nbytes)


def to_tokenize(nbytes: int, renders: int = 0) -> Limits:
    """The limits to tokenize text of this size; a conversation's template is rendered `renders` times.

    A BPE takes 1 microsecond for each byte, and 600 bytes for each token; each byte can be a token.
    """
    return Limits(WORKING.seconds + nbytes * (3e-5 + 5e-7 * renders), WORKING.nbytes + 1024 * nbytes)


def hold_to(limits: Limits) -> None:
    """Apply limits to this process, counted from now. The kernel refuses more memory (on Linux), and ends the process
    when it has used `seconds` of CPU time on every core."""
    _set(resource.RLIMIT_CPU, int(time.process_time() + limits.seconds * (os.cpu_count() or 1)) + 1)
    if _STATUS.is_file():
        # RLIMIT_DATA counts private writable memory. RLIMIT_AS would not do: each thread reserves 64 MB of addresses
        _set(resource.RLIMIT_DATA, int(_STATUS.read_text().split()[5]) * resource.getpagesize() + limits.nbytes)


def _set(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
