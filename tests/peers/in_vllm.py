"""What vLLM makes of directories, on a CPU."""

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).with_name("vllm_load.py")


def load_in_vllm(python: Path, *directories: Path) -> None:
    words = [word for directory in directories for word in (directory, out_of(directory))]
    environment = os.environ | {"VLLM_TARGET_DEVICE": "cpu", "PYTHONPATH": ""}
    subprocess.run([python, SCRIPT, *words], check=True, capture_output=True, env=environment)


def out_of(directory: Path) -> Path:
    """What vLLM made of a directory: its parameters; beside it, with `.error`, why it made nothing."""
    return directory.with_name(f"{directory.name}.out")
