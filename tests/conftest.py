"""Fixtures of several files."""

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from tokenizing import shared_processes
from training import make_place

from precisionctl.cli import group


@pytest.fixture(scope="session", autouse=True)
def tokenizers_stay() -> Iterator[None]:
    with shared_processes():
        yield


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source and texts for runs, which nothing changes."""
    return make_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(autouse=True)
def no_last_resort(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command has not foreseen fails a test, and is no error panel like others."""

    def fail(error: Exception) -> NoReturn:
        raise error

    if "last_resort" not in request.keywords:
        monkeypatch.setattr(group, "unexpected", fail)
