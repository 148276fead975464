"""JSON of measured numbers. JSON has no NaN and infinities: they are written as `null`, and read back as NaN."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any


def to_json_numbers(value: Any, indent: int | None = None) -> str:
    """JSON in which `null` stands for NaN and infinities."""
    return json.dumps(finite(value, lambda number: None), indent=indent, allow_nan=False)


def finite(value: Any, instead: Callable[[float], Any]) -> Any:
    """What JSON is made of, with something `instead` of NaN and infinities."""
    return _changed(value, lambda one: instead(one) if isinstance(one, float) and not math.isfinite(one) else one)


def nan_for_null(value: Any) -> Any:
    """Replace each None in parsed JSON by NaN; for JSON in which `null` stands only for numbers that are not finite."""
    return _changed(value, lambda one: math.nan if one is None else one)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _changed(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(each, change) for each in value]
    return change(value)
