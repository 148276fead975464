"""What a run writes down of itself: `metrics.jsonl`, a line a step, and TensorBoard events where that is installed."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.base import sync
from precisionctl.errors import DataError

FILE = "metrics.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step. `loss` is the mean over its target tokens, in nats; `seconds` its wall clock.

    `tokens` counts target tokens since the run began.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    seconds: float
    held_out_loss: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Without what was not measured."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}


class MetricsLog:
    """Appends steps to a run's folder, after dropping those beyond `step`, which the run will make again."""

    def __init__(self, folder: Path, step: int) -> None:
        path = folder / FILE
        kept = _keep_up_to(path, step)
        self.tokens = int(kept[-1]["tokens"]) if kept else 0
        self._file = open(path, "a", encoding="utf-8")
        self._board = _tensorboard(folder / "tensorboard", step)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not written, and how to have it."""
        return () if self._board else ("no TensorBoard events: install precisionctl[tracking]",)

    def write(self, metrics: StepMetrics) -> None:
        """One line, which a kill of the process leaves behind."""
        self.tokens = metrics.tokens
        values = metrics.as_dict()
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        if self._board:
            step = values.pop("step")
            for key, value in values.items():
                self._board.add_scalar(key, value, step)

    def sync(self) -> None:
        """Wait until the lines are on the disk: before a checkpoint that continues them is."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._board:
            self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a metrics file, up to a line that a kill cut short. Raises DataError for other garbage."""
    *whole, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return [_read_line(line, number, path) for number, line in enumerate(whole, start=1)]


def _read_line(line: str, number: int, path: Path) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(line)
        return row | {"step": int(row["step"]), "loss": float(row["loss"]), "tokens": int(row.get("tokens", 0))}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise DataError(
            f"line {number} is not a step's metrics: {line[:80]!r}",
            where=path,
            do="Remove that line; a run can go on without it.",
        ) from None


def _keep_up_to(path: Path, step: int) -> list[dict[str, Any]]:
    """What is kept; the file is replaced at once."""
    kept = [row for row in read_metrics(path) if row["step"] <= step] if path.exists() else []
    beside = path.with_suffix(".jsonl.partial")
    beside.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    sync(beside)
    os.replace(beside, path)
    return kept


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)
