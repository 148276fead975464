"""Environments of other programs, made once each under `.peers/`: they pin versions that we do not."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_with(name: str, *requirements: str) -> Path:
    """The Python of an environment that holds `requirements`, in the versions of constraints.txt where it has any."""
    folder = ROOT / ".peers" / name
    python, ready = folder / "bin" / "python", folder / "ready"
    wanted = "\n".join(requirements)
    if not ready.is_file() or ready.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "-q", "--constraint", ROOT / "constraints.txt"]
        subprocess.run([*pip, *requirements], check=True)
        ready.write_text(wanted)
    return python
