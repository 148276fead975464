"""The metrics of a run: `metrics.jsonl`, a line for each step, and `shadow.jsonl`, a line for each of the guard's
comparisons with BF16. Trackers get the same.

Reading them takes no PyTorch: `compare` does without.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from precisionctl.checkpoints.output import open_kept, write_then_rename
from precisionctl.errors import DataError
from precisionctl.recipe import Tracking
from precisionctl.sizes import size
from precisionctl.trainer.measure.json_numbers import nan_for_null, to_json_numbers
from precisionctl.trainer.measure.tracking import trackers

if TYPE_CHECKING:
    from precisionctl.trainer.measure.meter import StepCost
    from precisionctl.trainer.shadow import Shadow

_MAX_BYTES = 1_000_000_000
_LONGEST_LINE = 10_000_000
"""A shadow of a model with 100,000 modules."""

FILE = "metrics.jsonl"
SHADOWS = "shadow.jsonl"


def relative_gap(loss: float, first: float) -> float:
    """(loss - first) / first; from a first loss of 0, everything but 0 is infinitely far."""
    if first == 0:
        return 0.0 if loss == 0 else math.inf
    return (loss - first) / first


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step. `loss` is the mean over its target tokens, in nats; `seconds` is wall clock time.

    `tokens` is the number of target tokens since the run began. `fp8` says whether the step computed in FP8, in a run
    that may switch.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    seconds: float
    held_out_loss: float | None = None
    fp8: bool | None = None
    shadow: Shadow | None = None
    cost: StepCost | None = None
    router: Mapping[str, float] = field(default_factory=dict)
    """Losses of the routers, by name, without their coefficients."""
    skipped: int | None = None
    """If the update was skipped because its loss or gradient norm was not finite, the number skipped in a row."""

    def as_dict(self) -> dict[str, Any]:
        """The measured values by name, without the shadow, which has its own file."""
        values = {key: value for key, value in vars(self).items() if key not in ("shadow", "cost", "router")}
        values |= {f"router_{name}": value for name, value in self.router.items()}
        values |= vars(self.cost) if self.cost else {}
        return {key: value for key, value in values.items() if value is not None}


class MetricsLog:
    """Appends steps to the files in a run's folder, and passes them to trackers, which get `config` as the description
    of the run. Steps after `step`, which the run will make again, are removed first."""

    def __init__(self, folder: Path, step: int, tracking: Tracking, config: Mapping[str, Any]) -> None:
        self.tokens = _keep_up_to(folder / FILE, step)
        self._file = open_kept(folder / FILE)
        self._shadows = folder / SHADOWS
        self._shadow_file: IO[str] | None = None
        if self._shadows.exists():
            _keep_up_to(self._shadows, step)
        self._trackers = trackers(folder, step, tracking, config)

    def write(self, metrics: StepMetrics) -> None:
        """Append a step and flush it, so that it survives a kill of the process."""
        self.tokens = metrics.tokens
        values = metrics.as_dict()
        self._file.write(to_json_numbers(values) + "\n")
        self._file.flush()
        self._track(values.pop("step"), values)
        if shadow := metrics.shadow:
            if self._shadow_file is None:
                self._shadow_file = open_kept(self._shadows)
            self._shadow_file.write(to_json_numbers(shadow.as_dict()) + "\n")
            self._shadow_file.flush()
            self._track(shadow.step, {f"shadow/{key}": value for key, value in shadow.numbers().items()})

    def _track(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.write(step, values)

    def sync(self) -> None:
        """Sync the files, to be called before a checkpoint of the same step is written."""
        for file in filter(None, (self._file, self._shadow_file)):
            os.fsync(file.fileno())

    def close(self) -> None:
        for file in filter(None, (self._file, self._shadow_file)):
            file.close()
        for tracker in self._trackers:
            tracker.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The steps of a metrics file, one after the other, without an incomplete last line; `null` becomes NaN. Raises
    DataError for a file of other contents, or of more than fits into memory."""
    if path.exists() and path.stat().st_size > _MAX_BYTES:
        raise DataError(f"not a file of less than {size(_MAX_BYTES)}", where=path)
    return _steps(path)


def _steps(path: Path) -> Iterator[dict[str, Any]]:
    """As `read_metrics`, of a file of any size."""
    if path.exists() and not path.is_file():
        raise DataError("not a file", where=path)  # a pipe would never end
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for number in count(1):
            line = file.readline(_LONGEST_LINE)
            if not line.endswith("\n") and len(line) < _LONGEST_LINE:
                return
            try:
                row: dict[str, Any] = nan_for_null(json.loads(line))
                counted = {"tokens": int(row["tokens"])} if "tokens" in row else {}
                row |= {"step": int(row["step"]), "loss": float(row["loss"])} | counted
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                raise DataError(
                    f"line {number} is not a step's metrics: {line[:80].rstrip()!r}",
                    where=path,
                    do="Remove that line; a run can go on without it.",
                ) from None
            yield row


def _keep_up_to(path: Path, step: int) -> int:
    """Remove the steps after `step` from a file, atomically. Returns the tokens of the last one that is kept."""
    tokens = 0

    def write(new: Path) -> None:
        nonlocal tokens
        with open(new, "x", encoding="utf-8") as file:
            for row in _steps(path) if path.exists() else ():
                if row["step"] <= step:
                    file.write(to_json_numbers(row) + "\n")
                    tokens = row.get("tokens", 0)

    write_then_rename(path, write)
    return tokens
