"""The manifest of a result: the source and the plan that it was made from, the checksums that were read back, and the
precision of the run that trained its weights."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from precisionctl import __version__
from precisionctl.checkpoints.base import Reader
from precisionctl.errors import DamagedCheckpoint
from precisionctl.untrusted.safe_files import has_file, read_file
from precisionctl.untrusted.safe_json import parse_json

RELATIVE = Path("precisionctl/manifest.json")


@dataclass(frozen=True)
class RunOfWeights:
    """The recipe keys (`precision.scaling`) of the FP8 or NVFP4 run that weights come from, and whether its last step
    was in that precision. `of_weights` is the digest of the weights: of others this says nothing. It is empty until
    they are written."""

    keys: Mapping[str, Any]
    trained: bool
    of_weights: str = ""


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


def write_manifest(
    directory: Path, reader: Reader, digest: str, checksums: Mapping[str, str], run: RunOfWeights | None = None
) -> None:
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
    content: dict[str, Any] = {"versions": versions, "plan": digest, "source": source}
    if run:
        content["run"] = asdict(run)
    if checksums:
        content["sha256"] = dict(sorted(checksums.items()))
    (directory / RELATIVE).parent.mkdir(parents=True, exist_ok=True)
    (directory / RELATIVE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def run_in_manifest(reader: Reader) -> RunOfWeights | None:
    """What the manifest of an open checkpoint says of the run, whatever the weights are now; None if it has none, or
    says nothing. Raises DamagedCheckpoint for a manifest that is not what a command writes."""
    directory = reader.path
    if directory is None or not directory.is_dir() or not has_file(directory / RELATIVE, directory):
        return None
    file = directory / RELATIVE
    said = parse_json(read_file(file, directory), file).get("run")
    if said is None:
        return None
    kinds = {"keys": dict, "trained": bool, "of_weights": str}
    if not (isinstance(said, dict) and all(isinstance(said.get(key), kind) for key, kind in kinds.items())):
        raise DamagedCheckpoint("a manifest that does not say which run the weights are of", where=file)
    return RunOfWeights(**{key: said[key] for key in kinds})
