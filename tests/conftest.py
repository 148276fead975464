"""Fixtures of several files."""

from pathlib import Path

import pytest
from training import make_place


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source and texts for runs, which nothing changes."""
    return make_place(tmp_path_factory.mktemp("place"))
