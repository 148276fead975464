"""Real text that every machine has: the sources of Python's standard library, and what its functions say they do."""

import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

TRAINING_BYTES = 3_000_000
HELD_OUT_BYTES = 60_000
CHATS = 2000
_NOT_THE_LIBRARY = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__", "turtledemo"}


@dataclass(frozen=True)
class DemoText:
    """Directories of source files to train on and to hold out (no file is in both), and chats as JSONL."""

    train: Path
    held_out: Path
    chats: Path


def write_text(folder: Path) -> DemoText:
    """Copy the text into `folder`. The same Python gives the same files, in the same order."""
    library = Path(sysconfig.get_path("stdlib"))
    files: list[tuple[str, str]] = []  # module name and source of every file of the library
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).with_suffix("").parts
        if not _NOT_THE_LIBRARY & set(parts):
            files.append((".".join(parts), file.read_text(encoding="utf-8", errors="replace")))
    random.Random(0).shuffle(files)
    text = DemoText(folder / "train", folder / "held-out", folder / "chats.jsonl")
    used = _copy(files, text.held_out, HELD_OUT_BYTES)
    rest = files[used:]
    _copy(rest, text.train, TRAINING_BYTES)
    chats = islice((chat for name, source in rest for chat in _chats(name, source)), CHATS)
    text.chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
    return text


def _copy(files: list[tuple[str, str]], folder: Path, limit: int) -> int:
    """Write files until there are `limit` bytes; returns how many files that took."""
    folder.mkdir(parents=True)
    written = 0
    for number, (name, source) in enumerate(files):
        if written >= limit:
            return number
        written += (folder / f"{name}.py").write_text(source, encoding="utf-8")
    return len(files)


def _chats(name: str, source: str) -> Iterator[list[dict[str, str]]]:
    """A question for each documented function, answered by the first paragraph of its docstring."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # lib2to3 keeps a few files in older Pythons' syntax
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (said := ast.get_docstring(node)):
            question = f"What does this function of {name} do?\ndef {node.name}({ast.unparse(node.args)})"
            answer = said.split("\n\n")[0].strip()
            yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
