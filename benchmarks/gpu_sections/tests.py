"""`tests/gpu`, each test a row as soon as it has run: so that a call that is stopped has lost none of those before."""

import importlib.util
from pathlib import Path

import pytest

from gpu_sections.common import Place, Report

FOLDER = Path(__file__).parents[2] / "tests" / "gpu"

STUCK = 60
"""Seconds after which a test that runs still says where it is, in the section's log."""

PROCESSES = 8
"""That share the GPU, where pytest-xdist is installed: a test waits for the host more than for the GPU."""


class Rows:
    """A pytest plugin. What a test records, a gap say, is in its row."""

    def __init__(self, report: Report) -> None:
        self.report = report

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
    shared = ("-n", str(PROCESSES), "--dist", "worksteal") if importlib.util.find_spec("xdist") else ()
    pytest.main(["-q", "-p", "no:cacheprovider", *told, *shared, str(FOLDER)], plugins=[Rows(report)])
