"""What a tokenizer's process may take: the kernel holds it to that, whatever runs in it."""

import os
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/statm")


@dataclass(frozen=True)
class Limits:
    """Seconds until the answer must be there, and bytes of memory beyond what is in use."""

    seconds: float
    nbytes: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


LOADING = Limits(120.0, 1 << 30)
"""However small the files are: of a SentencePiece model transformers works out the merges, for up to half a minute."""

WORKING = Limits(10.0, 1 << 30)
"""For a batch of texts, or a conversation, however short."""


def to_load(nbytes: int) -> Limits:
    """For files of so many bytes: a BPE of 262,144 tokens, 23 MB, takes 0.4 GB and 2 s."""
    return Limits(LOADING.seconds + 5e-7 * nbytes, LOADING.nbytes + 32 * nbytes)


def to_tokenize(nbytes: int, renders: int = 0) -> Limits:
    """For text of so many bytes, or for a conversation that a template writes so many times, each time up to a message.

    A BPE takes 1 microsecond for a byte, and 600 bytes for each token, of which a byte can be one.
    """
    return Limits(WORKING.seconds + nbytes * (3e-5 + 5e-7 * renders), WORKING.nbytes + 1024 * nbytes)


def hold_to(limits: Limits) -> None:
    """Hold this process to limits, beginning now: asked for more memory, the kernel refuses; at the end of its CPU
    time, which is `seconds` of every core, it ends the process. Memory is bounded where Linux counts it."""
    _set(resource.RLIMIT_CPU, int(time.process_time() + limits.seconds * (os.cpu_count() or 1)) + 1)
    if (
        _STATUS.is_file()
    ):  # private and writable; address space is no measure, each thread reserves 64 MB that it may use
        _set(resource.RLIMIT_DATA, int(_STATUS.read_text().split()[5]) * resource.getpagesize() + limits.nbytes)


def _set(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
