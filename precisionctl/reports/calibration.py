"""What `calibrate` prints, in lines and as JSON."""

from collections import Counter
from typing import Any

from precisionctl.calibration.calibrate import Calibrated
from precisionctl.fp8.state import Role
from precisionctl.sizes import counted


def calibrated(made: Calibrated) -> list[str]:
    """What was recorded, by role, and what to do with it."""
    if made.signal:
        return [f"Stopped by {made.signal.name}.", "The same command continues from there."]
    counts = ", ".join(f"{role} {count}" for role, count in _recorded(made).items())
    passes, rows = counted(made.passes, "pass", "passes"), counted(made.rows, "row")
    return [
        f"Wrote {made.out}: {passes} of {rows}; recorded {counts}.",
        *made.notes,
        f"Give it to resume, convert or export-inference: --fp8-state {made.out}",
    ]


def calibrated_json(made: Calibrated) -> dict[str, Any]:
    """What `calibrate --json` prints (docs/json.md)."""
    return {
        "out": None if made.signal else str(made.out),
        "passes": made.passes,
        "rows": made.rows,
        "recorded": _recorded(made),
        "stopped": made.signal.name if made.signal else None,
        "kept": True if made.signal else None,
        "notes": [*made.notes],
    }


def _recorded(made: Calibrated) -> Counter[Role]:
    """The number of modules in which each role was recorded."""
    return Counter(
        role for state in made.states.modules.values() for role, part in state.roles.items() if part.recorded
    )
