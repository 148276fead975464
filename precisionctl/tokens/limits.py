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


LOADING = Limits(60.0, 2 << 30)
WORKING = Limits(10.0, 1 << 30)
"""For a batch of texts, or a conversation, however short."""


def to_load(nbytes: int) -> Limits:
    """For files of so many bytes. Of a tokenizer with 262,144 tokens, 33 MB, transformers makes 0.6 GB in 4 s."""
    return Limits(LOADING.seconds + nbytes / 1e6, LOADING.nbytes + 64 * nbytes)


def to_tokenize(nbytes: int, renders: int = 1) -> Limits:
    """For text of so many bytes, or a conversation that a template writes so many times.

    A byte-level BPE takes 1 µs for a byte, and 600 bytes for a token, of which a byte can be one.
    """
    return Limits(WORKING.seconds + 1e-5 * nbytes + 1e-6 * nbytes * renders, WORKING.nbytes + 1024 * nbytes)


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
