"""Loss curves, as runs leave them in `metrics.jsonl`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precisionctl.errors import DataError

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Curve:
    """The training loss of a run by step, in order."""

    name: str
    losses: Mapping[int, float]

    def against(self, first: "Curve") -> dict[int, float]:
        """(loss - first) / first for each step that both runs have."""
        return {step: self.losses[step] / loss - 1 for step, loss in first.losses.items() if step in self.losses}


def read_curves(paths: Sequence[Path]) -> list[Curve]:
    """The curves of several runs, named by their folders; by their whole paths where those are the same."""
    names = [path.name for path in paths]
    return [read_curve(path, str(path) if names.count(path.name) > 1 else path.name) for path in paths]


def read_curve(path: Path, name: str) -> Curve:
    """The curve of a run's folder, or of a metrics file. Raises DataError where there is none.

    A step that was run again after a crash counts as it was run last. A last line without its newline is
    still being written, and is left out.
    """
    file = path / METRICS if path.is_dir() else path
    try:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        do = "Give a folder that `precisionctl resume --out` wrote, or its metrics file."
        raise DataError(f"no metrics to read: {error}", where=path, do=do) from None
    entries = [_parse(line, file, number) for number, line in enumerate(lines, 1) if line.endswith("\n")]
    losses = {int(entry["step"]): float(entry["loss"]) for entry in entries if "loss" in entry}
    if not losses:
        raise DataError("no step has a loss yet", where=file)
    return Curve(name, dict(sorted(losses.items())))


def _parse(line: str, file: Path, number: int) -> dict[str, Any]:
    try:
        entry: dict[str, Any] = json.loads(line)
        entry["step"]
    except (ValueError, TypeError, KeyError):
        raise DataError("not a line of metrics", where=f"{file}, line {number}") from None
    return entry
