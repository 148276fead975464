"""Everything here needs Transformer Engine on a GPU with FP8, and is skipped, with the reason, elsewhere."""

from pathlib import Path

import pytest

from precisionctl.errors import EnvironmentProblem
from precisionctl.trainer.backend import choose_backend


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        choose_backend("te")
    except EnvironmentProblem as problem:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=problem.what))
