"""Everything here needs Transformer Engine on a GPU with FP8, and is skipped, with the reason, elsewhere.

`tests/peers/test_te_on_cpu.py` runs it without a GPU, over TE's own Python and stand-ins for its kernels.
"""

import warnings
from pathlib import Path

import pytest

from precisionctl.errors import EnvironmentProblem
from precisionctl.trainer.backend import choose_backend


def problem() -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what TE warns of when it is imported
        try:
            choose_backend("te")
        except EnvironmentProblem as found:
            return found.what
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = problem()
    for item in here:
        item.add_marker(pytest.mark.filterwarnings("default"))  # TE's warnings are no failures of ours
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure() -> None:
    problem()  # imported before the collection, where warnings are errors
