"""Where files of the project are."""

from pathlib import Path

HELPERS = Path(__file__).parent
"""Some are programs."""

ROOT = HELPERS.parents[1]
DOCS = ROOT / "docs"
TESTS = ROOT / "tests"
GOLDEN = TESTS / "golden"
"""What other programs wrote, and published configs."""
