"""The manifest of a result: the source and the plan that it was made from, and the checksums that were read back."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path

from precisionctl import __version__
from precisionctl.checkpoints.base import Reader

RELATIVE = Path("precisionctl/manifest.json")


def _within(file: Path, directory: Path | None) -> str:
    inside = directory is not None and file.is_relative_to(directory)
    return str(file.relative_to(directory)) if inside and directory else file.name


def fingerprint(reader: Reader) -> str:
    """SHA-256 of the names and sizes of a source's files, and of its config.json; not of the weights."""
    files = [[_within(file, reader.path), file.stat().st_size] for file in reader.files]
    about = hashlib.sha256(json.dumps(sorted(files)).encode())
    about.update(reader.companions.files.get("config.json", b""))
    return about.hexdigest()


def torch_version() -> str:
    """PyTorch's, without importing it."""
    return importlib.metadata.version("torch").partition("+")[0]


def write_manifest(directory: Path, reader: Reader, digest: str, checksums: Mapping[str, str]) -> None:
    """Write the manifest into a checkpoint's directory. It names no path and no time, so equal input gives equal bytes.

    `checksums` are the SHA-256 of each tensor's row-major bytes, by logical name; empty where nothing was read back.
    """
    source = {
        "container": reader.container,
        "architecture": reader.model.model_type,
        "iteration": reader.iteration,
        "fingerprint": fingerprint(reader),
        "files": {_within(file, reader.path): file.stat().st_size for file in reader.files},
    }
    versions = {"precisionctl": __version__, "torch": torch_version()}
    content = {"versions": versions, "plan": digest, "source": source}
    if checksums:
        content["sha256"] = dict(sorted(checksums.items()))
    (directory / RELATIVE).parent.mkdir(parents=True, exist_ok=True)
    (directory / RELATIVE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
