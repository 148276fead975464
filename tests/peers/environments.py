"""Environments of other programs, made once each under `.peers/`: they pin versions that we do not."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUR_VERSIONS = ("--constraint", str(ROOT / "constraints.txt"))


def python_with(name: str, *installs: Sequence[str], environment: Mapping[str, str] | None = None) -> Path:
    """The Python of an environment made by these `pip install`s, one after the other."""
    folder = ROOT / ".peers" / name
    python, ready = folder / "bin" / "python", folder / "ready"
    wanted = "\n".join(" ".join(install) for install in installs)
    if not ready.is_file() or ready.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        for install in installs:
            command = [python, "-m", "pip", "install", "-q", *install]
            subprocess.run(command, check=True, env=os.environ | (environment or {}))
        ready.write_text(wanted)
    return python
