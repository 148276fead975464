"""Which files beside the weights belong to a model, and JSON of strangers."""

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.base import Companions
from precisionctl.errors import DamagedCheckpoint
from precisionctl.untrusted.safe_files import read_file

# What transformers and the engines read beside the weights. Anything else in the directory is not the model.
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "tiktoken.model",
    "tekken.json",  # all that some of Mistral's have
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
)


def read_companions(directory: Path, *, links: bool) -> Companions:
    """The companion files in a directory; none where there is no directory, and never one named as weights are.

    `links`: whether symbolic links count, as they make up the cache of Hugging Face's hub. Raises DamagedCheckpoint
    for one that leads elsewhere.
    """
    paths = sorted(directory.iterdir()) if directory.is_dir() else []
    found = [path for path in paths if _is_companion(path, links)]
    return Companions({path.name: read_file(path, directory) for path in found})


def write_companions(directory: Path, companions: Companions) -> None:
    """Write them into a directory, which is made only where there are any."""
    for name, content in companions.files.items():
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


def _is_companion(path: Path, links: bool) -> bool:
    named = any(fnmatchcase(path.name, pattern) for pattern in _COMPANIONS) and path.suffix != ".safetensors"
    return named and not path.is_dir() and (links or not path.is_symlink())


def parse_json(data: bytes, where: object) -> dict[str, Any]:
    """A JSON object of a stranger. Raises DamagedCheckpoint for anything else, and where a key has two values."""
    try:
        parsed = json.loads(data, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"not readable as JSON: {error}", where=where) from error
    if not isinstance(parsed, dict):
        raise DamagedCheckpoint("not a JSON object", where=where)
    return parsed


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"`{key:.80}` is there twice")
        found[key] = value
    return found
