"""JSON of measured numbers. JSON has no NaN and infinities: they are written as `null`, and read back as NaN."""

import json
import math
from typing import Any


def to_json_numbers(value: Any, indent: int | None = None) -> str:
    """JSON in which `null` stands for NaN and infinities."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def nan_for_null(value: Any) -> Any:
    """Replace each None in parsed JSON by NaN; for JSON in which `null` stands only for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: nan_for_null(each) for key, each in value.items()}
    if isinstance(value, list):
        return [nan_for_null(each) for each in value]
    return math.nan if value is None else value
