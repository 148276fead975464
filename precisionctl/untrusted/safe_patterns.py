"""Regular expressions of strangers, as Python's `re` reads them, matched in bounded time and memory.

`re` tries one way after the other, whose number can grow exponentially with a name, and cannot be stopped. `regex` does
the same and can.
"""

import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from precisionctl.errors import PrecisionctlError, shown

_MATCH, _CHECK, _OBJECT = 0.5, 2.0, 10.0
"""Seconds that one match may take, all of a check together (`in_time`), and else all of one object: patterns that take
nearly as long as a match may, for many names, would take hours."""
_OF_A_MATCH, _OF_EACH = 50e-6, 5e-6
"""What each match adds to these seconds, and each pattern in it: ten times what they need."""
_LONGEST = 1 << 17
"""Letters of all patterns of an object. The time limits do not hold for compiling them."""
_MOST_COPIES = 1_000_000
"""Most letters of them with what they repeat written out, as `regex` does: `(a{1000}){1000}` takes 0.3 GB."""
_OTHERWISE = re.compile(r"\\[^1-9]|(\[:|\\\d?|\(\?P=|\(\?\(|\{(?!\d+(?:,\d*)?\}))")
"""Finds, past what is escaped, what `regex` reads otherwise than `re`: classes of POSIX, and in braces anything but
numbers, as how many errors are let through. And references, as groups of joined patterns have other numbers."""

_left: ContextVar[list[float]] = ContextVar("_left")
"""One number: how many seconds of a check are left."""


@contextmanager
def in_time() -> Iterator[None]:
    """Within it all matches together are limited."""
    token = _left.set([_CHECK])
    try:
        yield
    finally:
        _left.reset(token)


class Patterns:
    """Regular expressions, each between `before` and `after`. Raises what `refused` makes of a sentence for one that is
    invalid or too large, and when matching takes too long."""

    def __init__(
        self, patterns: Sequence[str], refused: Callable[[str], PrecisionctlError], before: str = "", after: str = ""
    ) -> None:
        import regex  # here, because it takes 7 MB, and most commands match nothing

        self._patterns, self._refused, self._left = patterns, refused, [_OBJECT]
        if sum(map(len, patterns)) > _LONGEST:
            raise refused(f"patterns of more than {_LONGEST} letters cannot be read")
        if sum(map(_copies, patterns)) > _MOST_COPIES:
            raise refused(f"{_words(patterns)} cannot be read: too many repetitions within each other")
        spelled = [f"{before}{pattern}{after}" for pattern in patterns]
        for pattern, whole in zip(patterns, spelled, strict=True):
            if problem := _problem(pattern, whole):
                raise refused(f"{_words([pattern])} cannot be read: {problem}")
        joined = "|".join(f"(?:{whole})(?P<_{number}>)" for number, whole in enumerate(spelled)) or "(?!)"
        try:
            if len(patterns) > 1:
                re.compile(joined)  # no flag of one that would hold for all, nor two groups of a name
            self._joined = regex.compile(joined)
        except (re.error, regex.error, RecursionError) as error:
            raise refused(f"{_words(patterns)} cannot be read: {error}") from None

    def first(self, name: str, *, anywhere: bool = False) -> int | None:
        """The number of the first pattern that matches at the start of a name; `anywhere`: at the first place at which
        one does."""
        left, began = _left.get(self._left), time.thread_time()
        try:
            if left[0] < 0:
                raise TimeoutError
            match = (self._joined.search if anywhere else self._joined.match)(name, timeout=_MATCH)
        except TimeoutError:
            raise self._refused(f"matching {_words(self._patterns)} takes too long") from None
        finally:
            left[0] += _OF_A_MATCH + _OF_EACH * len(self._patterns) - (time.thread_time() - began)
        return int(match.lastgroup[1:]) if match else None


def _problem(pattern: str, whole: str) -> str | None:
    """Why a pattern is not read, if it is not."""
    if any(letter.isspace() for letter in pattern):  # `(?x)` skips it, within numbers too; names of modules have none
        return "blanks"
    if odd := next((found[1] for found in _OTHERWISE.finditer(pattern) if found[1]), None):
        return f"`{odd}`"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # of sets that are to become sets of sets
            re.compile(whole)
    except (re.error, FutureWarning, OverflowError, RecursionError) as error:
        return str(error)
    return None


def _words(patterns: Sequence[str]) -> str:
    return f"the pattern {shown(patterns[0])}" if len(patterns) == 1 else f"one of {len(patterns)} patterns"


def _copies(pattern: str) -> int:
    """The letters of a pattern with what it repeats written out: what is within `+` stands there twice, what is within
    `{n}` n times. Nothing is within more of them than there are brackets, and one."""
    repeated = [int(count or 0) + 1 for count in re.findall(r"\{\D*(\d*)", pattern)] + [2] * pattern.count("+")
    return len(pattern) * math.prod(sorted(repeated)[-1 - pattern.count("(") :])
