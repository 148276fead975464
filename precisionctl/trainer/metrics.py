"""What a run writes down of itself: `metrics.jsonl`, a line a step, and TensorBoard events where that is installed."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.base import sync

FILE = "metrics.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step. `loss` is the mean over its target tokens, in nats; `seconds` its wall clock.

    `tokens` counts target tokens since step 1. `fp8_saturated` is the share of quantized roles whose amax went
    beyond the range of their scale in this step: delayed scaling's surprise, at most 1.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    seconds: float
    held_out_loss: float | None = None
    fp8_saturated: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Without what was not measured."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}


class MetricsLog:
    """Appends steps to a run's folder, after dropping those beyond `step`, which the run will make again."""

    def __init__(self, folder: Path, step: int) -> None:
        self._path = folder / FILE
        _keep_up_to(self._path, step)
        self._file = open(self._path, "a", encoding="utf-8")
        self._board = _tensorboard(folder / "tensorboard", step)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not written, and how to have it."""
        return () if self._board else ("no TensorBoard events: install precisionctl[tracking]",)

    def write(self, metrics: StepMetrics) -> None:
        """One line, on its way to the disk before the next step."""
        values = metrics.as_dict()
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        if self._board:
            step = values.pop("step")
            for key, value in values.items():
                self._board.add_scalar(key, value, step)

    def close(self) -> None:
        self._file.close()
        if self._board:
            self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a metrics file, up to a line that a kill cut short."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        rows.append(json.loads(line))
    return rows


def _keep_up_to(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = [row for row in read_metrics(path) if row["step"] <= step]
    beside = path.with_suffix(".jsonl.partial")
    beside.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    sync(beside)
    os.replace(beside, path)


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)
