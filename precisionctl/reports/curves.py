"""Loss curves, as runs leave them in `metrics.jsonl`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.open import is_checkpoint
from precisionctl.errors import DataError
from precisionctl.paths import own_name
from precisionctl.trainer.measure.metrics import FILE, SHADOWS, read_metrics, relative_gap


@dataclass(frozen=True)
class Curve:
    """The training loss of a run by step, in order."""

    name: str
    losses: Mapping[int, float]

    def against(self, first: "Curve") -> dict[int, float]:
        """The relative gap to `first` at each step that both runs have."""
        losses = self.losses
        return {step: relative_gap(losses[step], loss) for step, loss in first.losses.items() if step in losses}


def read_shadows(path: Path) -> list[dict[str, Any]]:
    """The shadows of a run, in order: lines of `shadow.jsonl` beside its metrics; none where it is not there.
    Raises DataError for one that no run wrote."""
    file = (path if path.is_dir() else path.parent) / SHADOWS
    of_the_model = (
        {key: value for key, value in row.items() if key != "modules"} for row in read_metrics(file)
    )  # modules are many, and read by nobody here
    rows = [*of_the_model] if file.exists() else []
    if any(not isinstance(row.get(key), float) for row in rows for key in ("gap", "grad_cosine", "grad_norm_ratio")):
        raise DataError("a line is not what a guard writes", where=file)
    return rows


def read_curves(paths: Sequence[Path]) -> list[Curve]:
    """The curves of several runs, named by their folders; by their whole paths where those are the same."""
    names = [own_name(path) for path in paths]
    named = zip(paths, names, strict=True)
    return [read_curve(path, str(path) if names.count(name) > 1 else name) for path, name in named]


def read_curve(path: Path, name: str) -> Curve:
    """The curve of a run's folder, or of a metrics file. Raises DataError where there is none."""
    file = path / FILE if path.is_dir() else path
    try:
        losses = {row["step"]: row["loss"] for row in read_metrics(file) if "skipped" not in row}
    except OSError as error:
        do = "Give a folder that `precisionctl resume --out` wrote, or its metrics file."
        if is_checkpoint(path):
            do += " To compare two checkpoints: `precisionctl verify A B`."
        raise DataError(f"no metrics to read: {error.strerror}", where=file, do=do) from None
    if not losses:
        raise DataError("no step has a loss yet", where=file)
    return Curve(name, dict(sorted(losses.items())))
