"""Cases of slow tests that repeat others: `make soak` runs them, `make test` does not."""

from collections.abc import Iterable
from typing import Any

import pytest


def few(cases: Iterable[str], *kept: str) -> list[Any]:
    """All cases, by name, of which `make soak` alone runs those that are not kept."""
    return [pytest.param(name, marks=[] if name in kept else [pytest.mark.soak]) for name in cases]


def in_soak(*cases: Any) -> list[Any]:
    """These cases as parameters that `make soak` alone runs. A tuple is the values of several parameters."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak) for case in cases]


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """All cases, of which `make soak` alone runs those behind the first ones."""
    every = list(cases)
    return [*every[:count], *in_soak(*every[count:])]
