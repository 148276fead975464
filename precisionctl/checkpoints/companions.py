"""Which files beside the weights belong to a model, and JSON of strangers."""

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.base import Companions
from precisionctl.errors import DamagedCheckpoint
from precisionctl.untrusted.safe_files import read_files

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

_MOST_PARTS, _DEEPEST = 8_000_000, 100
"""Of JSON: beyond an index of every tensor there is, and no more than a gigabyte of lists."""


def read_companions(directory: Path) -> Companions:
    """The companion files in a directory; none where there is no directory, and never one named as weights are.

    Raises DamagedCheckpoint for a link that leads elsewhere (not those of the hub's cache), for what is no file, and
    where they are too large to be held together.
    """
    paths = sorted(directory.iterdir()) if directory.is_dir() else []
    found = [path for path in paths if _is_companion(path)]
    return Companions(read_files(found, directory))


def write_companions(directory: Path, companions: Companions) -> None:
    """Write them into a directory, which is made only where there are any."""
    for name, content in companions.files.items():
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


def _is_companion(path: Path) -> bool:
    named = any(fnmatchcase(path.name, pattern) for pattern in _COMPANIONS) and path.suffix != ".safetensors"
    folder = path.is_dir() and not path.suffix  # `tokenizer/`, which is no file that went wrong
    return named and not folder


def parse_json(data: bytes, where: object) -> dict[str, Any]:
    """A JSON object of a stranger. Raises DamagedCheckpoint for anything else, for one with more or deeper parts than
    any has, and where a key has two values."""
    if sum(map(data.count, (b",", b"[", b"{"))) > _MOST_PARTS:
        raise DamagedCheckpoint(f"JSON of more than {_MOST_PARTS:,} parts", where=where, do="Is the copy whole?")
    try:
        parsed = json.loads(data, object_pairs_hook=_once)
        if isinstance(parsed, dict):
            _check_depth(parsed)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"not readable as JSON: {error}", where=where) from error
    if not isinstance(parsed, dict):
        raise DamagedCheckpoint("not a JSON object", where=where)
    return parsed


def _check_depth(value: Any) -> None:
    """Raise ValueError for containers so deep in one another that walking through them, or writing them, fails."""
    level = [value]
    for _ in range(_DEEPEST):
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        level = [part for parts in inside for part in parts if isinstance(part, dict | list)]
        if not level:
            return
    raise ValueError(f"parts that are more than {_DEEPEST} deep in one another")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"`{key:.80}` is there twice")
        found[key] = value
    return found
