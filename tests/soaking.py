"""Cases of slow tests that repeat others: `make soak` runs them, `make test` does not."""

from typing import Any

import pytest


def in_soak(*cases: Any) -> list[Any]:
    """These cases as parameters that `make soak` alone runs. A tuple is the values of several parameters."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak) for case in cases]
