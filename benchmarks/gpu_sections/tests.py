"""`tests/gpu`, each test a row as soon as it has run: so that a call that is stopped has lost none of those before."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_sections.common import Place, Report

FOLDER = Path(__file__).parents[2] / "tests" / "gpu"
FIRST = ("test_te_facts", "test_te_modules", "test_te_replay", "test_te_gpts", "test_te_payloads")
"""What all else stands on, so wanted most of a call that is stopped: TE's facts, linears, scales, GPTs and state."""

STUCK = 60
"""Seconds after which a test that runs still says where it is, in the section's log."""


class Rows:
    """A pytest plugin. What a test records, a gap say, is in its row."""

    def __init__(self, report: Report) -> None:
        self.report = report

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        yield  # to the order of tests/conftest.py
        items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = {"test": report.nodeid.rpartition("gpu/")[2], "seconds": report.duration}
        if report.failed:
            what = f"{report.when}: {report.longreprtext.strip().splitlines()[-1][:300]}"
            self.report(row | {"error": what, "trace": report.longreprtext[-3000:]})
        elif report.skipped:
            self.report(row | {"skipped": report.longrepr[2] if isinstance(report.longrepr, tuple) else ""})
        elif report.when == "call":
            self.report(row | {"passed": True, "found": dict(report.user_properties)})


def measure(place: Place, report: Report) -> None:
    told = ("-W", "default", "-o", f"faulthandler_timeout={STUCK}")
    pytest.main(["-q", "-p", "no:cacheprovider", *told, str(FOLDER)], plugins=[Rows(report)])
