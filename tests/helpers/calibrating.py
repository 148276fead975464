"""Calibrations of a pico Llama."""

from pathlib import Path
from typing import Any

from training import SMALL

from precisionctl.calibration.calibrate import Calibration

HISTORY = 32


def asked(place: Path, out: Path, **changes: Any) -> Calibration:
    """Of the recipe of `training`, with a history for all passes. All share the tokens of the text."""
    keys = (
        SMALL
        | {"precision.delayed.amax_history_len": HISTORY, "data.cache": place / "tokens"}
        | changes.pop("keys", {})
    )
    overrides = tuple(f"{key}={value}" for key, value in keys.items())
    fields = {"passes": 20, "backend": "emulated", **changes}
    return Calibration(place / "source", place / "text.txt", out, overrides=overrides, **fields)
