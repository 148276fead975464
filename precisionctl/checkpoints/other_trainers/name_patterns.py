"""Names of other programs as patterns, in which `#` stands for each number of a layer or an expert."""

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9]\d{0,8})(?=\.)")


def pattern_of(name: str) -> tuple[str, list[str]]:
    """A name's pattern, and the numbers in it."""
    return _NUMBER.sub("#", name), _NUMBER.findall(name)


def with_numbers(pattern: str, numbers: Sequence[str]) -> str:
    """The name that a pattern has with these numbers, in their order; `#` stays where there are no more of them."""
    for number in numbers:
        pattern = pattern.replace("#", number, 1)
    return pattern
