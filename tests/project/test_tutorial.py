"""The tutorial is run as it stands: its Python, its recipe, and every command line."""

import re
import shlex
from pathlib import Path

import pytest
import repository
from click.testing import CliRunner

from precisionctl.cli import main

PAGE = (repository.DOCS / "tutorial.md").read_text(encoding="utf-8")


@pytest.mark.soak
def test_each_command_ends_well_and_says_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = ""
    for kind, text in re.findall(r"```(\w*)\n(.+?)```", PAGE, re.DOTALL):
        if kind == "python":
            exec(text, {})
        elif kind == "toml":
            Path("small.toml").write_text(text)
        for line in re.findall(r"^precisionctl (.+)", text, re.MULTILINE):
            result = CliRunner().invoke(main, shlex.split(line))
            assert result.exit_code == 0, result.output
            shown += result.output
    for sentence in (
        "The same: all 39 tensors.",
        "FP8 state of modules: warm-up: input 16",
        "every rule is kept",
        "KL divergence",
    ):
        assert sentence in shown
