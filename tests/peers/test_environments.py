"""An environment is made once for all checkouts, and again when what it is to hold has changed."""

from pathlib import Path

import environments
import pytest


def test_checkouts_share_an_environment_until_their_constraints_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared" / "some").mkdir(parents=True)
    commands: list[object] = []
    monkeypatch.setattr(environments.subprocess, "run", lambda command, **_: commands.append(command))
    for checkout, versions, made in (("one", "a==1", True), ("two", "a==1", False), ("three", "a==2", True)):
        root = tmp_path / checkout
        root.mkdir()
        (root / ".peers").symlink_to(tmp_path / "shared")
        (root / "constraints.txt").write_text(versions)
        monkeypatch.setattr(environments, "ROOT", root)
        monkeypatch.setattr(environments, "CONSTRAINTS", root / "constraints.txt")
        commands.clear()
        environments.python_with("some", ("--constraint", str(root / "constraints.txt"), "a"))
        assert bool(commands) == made, checkout
