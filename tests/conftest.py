"""Fixtures of several files. They import what they need: the process that deals tests out to others needs none of it,
and would import for eight seconds before those start."""

import gc
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import pytest

# `make soak` draws a hundred new ones, beside other processes on the same cores: time says nothing there either
hypothesis.settings.register_profile("soak", deadline=None)
hypothesis.settings.load_profile("soak")
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("ci"), max_examples=50)

gc.disable()  # until all is imported and collected: that stays, and going through it took a quarter of the time


def pytest_xdist_auto_num_workers() -> int:
    """One more than cores: tests wait for processes and disks in a sixth of their time."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(scope="session", autouse=True)
def forks_stay() -> Iterator[None]:
    from pico import models_kept
    from programs import forked_programs
    from tokenizing import shared_processes

    with shared_processes(), forked_programs(), models_kept():
        yield


@pytest.fixture(scope="session", autouse=True)
def one_worker() -> None:
    """What writes is one process unless a test asks for more: forking two, as users have it, takes longer than a small
    model, and tests of several compare with one."""
    from precisionctl.cli import main
    from precisionctl.conversion.command import execute

    for command in main.commands.values():
        for option in command.params:
            if option.name == "workers" and option.default == 2:
                option.default = 1
    assert execute.__kwdefaults__["workers"] == 2
    execute.__kwdefaults__["workers"] = 1


@pytest.fixture(scope="session", autouse=True)
def disks_are_not_waited_for() -> Iterator[None]:
    """What is synced is safe when the power fails, which no test can see; waiting for that takes a twentieth of the
    time. Tests of what is synced, and when, have a stand-in of their own."""
    before = os.fsync
    os.fsync = lambda handle: None
    yield
    os.fsync = before


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source and texts for runs, which nothing changes."""
    from training import make_place

    return make_place(tmp_path_factory.mktemp("place"))


@pytest.fixture
def bf16_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """BF16's products are computed as on a CPU that PyTorch has kernels for, also on one without."""
    from precisionctl.trainer.backends import bf16_products

    monkeypatch.setattr(bf16_products, "cpu_has_bf16_kernels", lambda: True)


@pytest.fixture(autouse=True)
def no_last_resort(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command has not foreseen fails a test, and is no error like others."""

    from precisionctl.cli import group

    def fail(error: Exception) -> NoReturn:
        raise error

    if "last_resort" not in request.keywords:
        monkeypatch.setattr(group, "unexpected", fail)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Steps in which the first MLP gives out infinities."""
    from precisionctl.trainer import resume as trainer

    steps: set[int] = set()
    before = trainer.train

    def train(run: Any, *how: Any) -> Any:
        mlp = run.model.get_submodule("decoder.layers.0.mlp")
        mlp.register_forward_hook(lambda _, __, out: out * math.inf if run.step + 1 in steps else out)
        return before(run, *how)

    monkeypatch.setattr(trainer, "train", train)
    return steps


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of few tests first, which are the slow ones: at the end no process waits long for the other one's file."""
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: counts[item.path])


def pytest_collection_finish(session: pytest.Session) -> None:
    from programs import fork_server

    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # what is in cycles is small here, and looking for it took a tenth of the time
    gc.enable()
    if not session.config.getoption("collectonly") and session.items:
        fork_server()
