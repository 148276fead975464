"""vLLM on a CPU: its environment, and what it makes of directories."""

import os
import subprocess
from pathlib import Path

import environments
import torch

SCRIPT = Path(__file__).with_name("vllm_load.py")
BUILD = (
    "setuptools<81",
    "setuptools_scm",
    "setuptools-rust",
    "wheel",
    "ninja",
    "cmake",
    "packaging",
    "jinja2",
    "numpy",
)
VLLM = ("--no-build-isolation", "--no-binary=vllm", "--no-deps", "vllm==0.33.0")
TOO_NEW = ("certifi",)
"""What vLLM asks for in a version of the last days, which not every index has yet: nothing here goes by it."""
WITHOUT_KERNELS = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": "0.33.0"}


def vllm() -> Path:
    """The Python of an environment with vLLM, and the torchvision that belongs to its torch, for models of images."""
    version = torch.__version__.partition("+")[0]
    images = f"torchvision==0.{int(version.split('.')[1]) + 15}.*"
    return environments.python_with(
        "vllm",
        (f"torch=={version}", *BUILD),
        VLLM,
        ("--no-deps", images),
        environment=WITHOUT_KERNELS,
        without_dependencies="vllm",
        any_version=TOO_NEW,
    )


def load_in_vllm(python: Path, *directories: Path) -> None:
    words = [word for directory in directories for word in (directory, out_of(directory))]
    environment = os.environ | {"VLLM_TARGET_DEVICE": "cpu", "PYTHONPATH": ""}
    subprocess.run([python, SCRIPT, *words], check=True, capture_output=True, env=environment)


def out_of(directory: Path) -> Path:
    """What vLLM made of a directory: its parameters; beside it, with `.error`, why it made nothing."""
    return directory.with_name(f"{directory.name}.out")
