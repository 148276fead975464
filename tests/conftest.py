"""Fixtures of several files."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizing import shared_processes
from training import make_place


@pytest.fixture(scope="session", autouse=True)
def tokenizers_stay() -> Iterator[None]:
    with shared_processes():
        yield


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source and texts for runs, which nothing changes."""
    return make_place(tmp_path_factory.mktemp("place"))
