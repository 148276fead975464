"""Regular expressions of a stranger, matched in time that is linear in the length of a name.

Python's `re`, with which peft matches, tries one way after the other, and their number can grow exponentially. Here all
ways are followed at once, as a set of states (Thompson 1968), and the sets that were reached are kept. So a name that
begins as another did costs one look-up per letter, however many expressions there are.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import reduce

from precisionctl.errors import MappingError, shown

_MOST_STATES = 1 << 17
"""Of all expressions together, with what `{n}` repeats written out."""
_MOST_STEPS = 1 << 23
"""From one state to another, in all sets that are made: some seconds, and at most 64 MiB."""
_STEPS_OF_A_SET = 16
_DEEPEST = 50
"""Groups within groups."""

_LETTER = re.compile(
    r"\[\^?(?:\\[dDsSwW]|\\[^0-9a-zA-Z]|[\w.]|-(?!-))+\]|\\[dDsSwW]|\\[^0-9a-zA-Z]|[^\\()\[\]{}|*+?^$]"
)
"""What stands for one letter."""
_TIMES = re.compile(r"([*+?])|\{(\d{1,4})(?:(,)(\d{1,4})?)?\}")
_BEGIN, _END = "^", "$"

_On = re.Pattern[str] | str | None
"""What is needed to leave a state: a letter, one of the two anchors, or nothing."""
_Part = Callable[[int], int]
"""A part of an expression: adds its states, given the one after them, and returns its first."""


class Expressions:
    """Regular expressions for whole names, as `re` reads them: letters, `.`, `[...]`, `\\d`, `\\w`, `\\s`, groups of
    alternatives, `*`, `+`, `?`, `{n}` (lazy ones too), `^` and `$`. Names have no line breaks.

    `key` says where the expressions stand. With `ends` they are also for what is behind a dot of a name. Raises
    MappingError for any other expression, and for more than can be matched in seconds.
    """

    def __init__(self, patterns: Sequence[str], key: str, *, ends: bool = False) -> None:
        self._key, self._count, self._steps = key, len(patterns), 0
        self._states = _States(key)
        lasts = [self._states.add(None) for _ in patterns]  # so a state's number is that of the expression it ends
        begins: list[int] = []
        for pattern, last in zip(patterns, lasts, strict=True):
            part = _Parser(pattern, self._states).whole()
            if part is None:
                what = f"{key} has an expression that is not read: {shown(pattern)}"
                raise MappingError(
                    what, do="Write it with letters, `.`, `*`, `[...]` and groups of alternatives alone."
                )
            begins.append(part(last))
        if ends and (behind := _Parser(r"(.*\.)?", self._states).whole()):
            begins = [behind(self._states.add(None, *begins))]
        self._sets: list[tuple[int, ...]] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._next: dict[tuple[int, str], int] = {}
        self._found: dict[int, int | None] = {}
        self._begin = self._reached(begins, _BEGIN)

    def first(self, name: str) -> int | None:
        """The number of the first expression that matches a name."""
        at = self._begin
        for letter in name:
            after = self._next.get((at, letter))
            if after is None:
                self._steps += len(self._sets[at])
                moved = [to for state in self._sets[at] for to in self._states.after_letter(state, letter)]
                after = self._next[at, letter] = self._reached(moved)
            at = after
        if at not in self._found:
            ended = self._sets[self._reached(self._sets[at], _END)]
            self._found[at] = ended[0] if ended and ended[0] < self._count else None
        return self._found[at]

    def _reached(self, states: Iterable[int], anchor: str | None = None) -> int:
        """The number of the set of these states and all that are reached from them without a letter, where this anchor
        holds."""
        seen, left = set(states), list(states)
        while left:
            state = left.pop()
            if self._states.on[state] in (None, anchor):
                new = set(self._states.after[state]) - seen
                seen |= new
                left += new
        self._steps += _STEPS_OF_A_SET + len(seen)
        if self._steps > _MOST_STEPS:
            raise MappingError(f"the expressions of {self._key} take too many steps to match", do=FEWER)
        kept = tuple(sorted(one for one in seen if one < self._count or self._states.on[one] is not None))
        number = self._numbers.setdefault(kept, len(self._sets))
        if number == len(self._sets):
            self._sets.append(kept)
        return number


FEWER = "Name the modules in it with fewer expressions."


class _States:
    """The states of all expressions: what is needed to leave each, and for which."""

    def __init__(self, key: str) -> None:
        self.on: list[_On] = []
        self.after: list[tuple[int, ...]] = []
        self._key = key

    def add(self, on: _On, *after: int) -> int:
        if len(self.on) >= _MOST_STATES:
            raise MappingError(f"the expressions of {self._key} are longer than {_MOST_STATES} letters", do=FEWER)
        self.on.append(on)
        self.after.append(after)
        return len(self.on) - 1

    def after_letter(self, state: int, letter: str) -> tuple[int, ...]:
        on = self.on[state]
        return self.after[state] if isinstance(on, re.Pattern) and on.match(letter) else ()


class _Parser:
    """An expression as parts, read from left to right."""

    def __init__(self, pattern: str, states: _States) -> None:
        self._pattern, self._states = pattern, states
        self._at = self._depth = 0

    def whole(self) -> _Part | None:
        """The expression; None if it cannot be read."""
        try:
            part = self._alternatives()
        except (_Unread, re.error):
            return None
        return part if self._at == len(self._pattern) else None

    def _alternatives(self) -> _Part:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else lambda after: self._states.add(None, *(part(after) for part in parts))

    def _sequence(self) -> _Part:
        parts: list[_Part] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            part = self._one()
            times = _TIMES.match(self._pattern, self._at)
            if times:
                self._at = times.end()
                self._take("?")  # lazy: the same names match
                part = self._repeated(part, times)
            parts.append(part)
        return lambda after: reduce(lambda to, part: part(to), reversed(parts), after)

    def _repeated(self, part: _Part, times: re.Match[str]) -> _Part:
        low = int(times[2] or times[1] == "+")
        high = 1 if times[1] == "?" else None if times[1] or (times[3] and not times[4]) else int(times[4] or low)
        if (high is not None and high < low) or self._pattern[times.start() - 1] in (_BEGIN, _END):
            raise _Unread
        states = self._states

        def added(after: int) -> int:
            first = after
            if high is None:
                first = states.add(None)
                states.after[first] = (part(first), after)
            for _ in range((high or low) - low):
                first = states.add(None, part(first), after)
            for _ in range(low):
                first = states.add(None, part(first))
            return first

        return added

    def _one(self) -> _Part:
        """A group, an anchor, or what stands for a letter."""
        if self._take("("):
            self._take("?:")
            self._depth += 1
            if self._depth > _DEEPEST:
                raise _Unread
            part = self._alternatives()
            self._depth -= 1
            if not self._take(")"):
                raise _Unread
            return part
        if self._take(_BEGIN):
            return lambda after: self._states.add(_BEGIN, after)
        if self._take(_END):
            return lambda after: self._states.add(_END, after)
        found = _LETTER.match(self._pattern, self._at)
        if found is None:
            raise _Unread
        self._at = found.end()
        letter = re.compile(found[0])
        return lambda after: self._states.add(letter, after)

    def _take(self, word: str) -> bool:
        taken = self._pattern.startswith(word, self._at)
        self._at += len(word) if taken else 0
        return taken


class _Unread(Exception):
    pass
