"""FP8 state: what was recorded of each module, when, and whether with the weights beside it; as data and in tables."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from precisionctl.checkpoints.base import Reader
from precisionctl.conversion.known_state import is_of_weights, why_outdated
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.errors import PrecisionctlError
from precisionctl.fp8.delayed_scaling import recorded_amax
from precisionctl.fp8.state import ATTENTION, ROLES, Fp8States
from precisionctl.reports.table import Table
from precisionctl.sizes import counted
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor


def describe_fp8(states: Fp8States, reader: Reader | None) -> dict[str, Any]:
    """What `--json` prints of FP8 state: that of the checkpoint that a reader reads, or of a file (None)."""
    iteration = reader.iteration if reader else None
    age = None if iteration is None or states.iteration is None else iteration - states.iteration
    if age is not None and age < 0:  # another container's count, as of updates
        age = None
    of_its: bool | None = None
    if reader:
        with suppress(PrecisionctlError):  # if too much of the checkpoint is missing to tell
            of_its = is_of_weights(states, digest_weights(reader), reader)
    roles = [*ROLES, *(role for role in ATTENTION if any(role in state.roles for state in states.modules.values()))]
    return {
        "recipe": asdict(states.recipe),
        "producer": states.producer,
        "recorded_at_iteration": states.iteration,
        "age_in_steps": age,
        "of_these_weights": of_its,
        "why_not_used": why_outdated(states) if of_its is False else None,
        "never_recorded": {
            role: sum(role in state.roles and not state.roles[role].recorded for state in states.modules.values())
            for role in roles
        },
        "not_understood": sorted(states.raw),
        "notes": list(states.notes),
        "modules": {
            name: {
                role: {
                    "recorded": part.recorded,
                    "amax": _plain(recorded_amax(part, role, states.recipe)),  # the largest of the history
                    "scale": _plain(part.scale),
                    "rows_recorded": int((part.amax_history != 0).sum()),
                }
                for role, part in state.roles.items()
            }
            for name, state in states.modules.items()
        },
    }


def _plain(values: Tensor) -> Any:
    """A number; of experts a list of them."""
    return values.to(torch.float64).tolist()


def fp8_rows(fp8: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of what `describe_fp8` gives, all but the modules: recipe, age, and what was kept unread."""
    recipe = fp8["recipe"]
    words = (
        f"delayed scaling, {recipe['fp8_format']}, history {recipe['amax_history_len']}, "
        f"{recipe['amax_compute_algo']}, margin {recipe['margin']}"
    )
    recorded = fp8["recorded_at_iteration"]
    when = "recorded at an unknown iteration" if recorded is None else f"recorded at iteration {recorded}"
    age = fp8["age_in_steps"]
    ago = f", {counted(age, 'step')} ago" if age else ""
    of_its = fp8["of_these_weights"]
    used = (
        "; not compared with weights" if of_its is None else "" if of_its else f"; not used: it {fp8['why_not_used']}"
    )
    rows = [
        ("FP8 recipe", words),
        ("FP8 state", f"{counted(len(fp8['modules']), 'module')}, {when}{ago}{used}"),
    ]
    if fp8["not_understood"]:
        rows.append(("kept unread", ", ".join(fp8["not_understood"])))
    return rows + [("", note) for note in fp8["notes"]]


def role_table(fp8: Mapping[str, Any]) -> Table:
    """How many modules have recorded what, and within which limits."""
    rows = []
    for role, never in fp8["never_recorded"].items():
        recorded = [each[role] for each in fp8["modules"].values() if role in each and each[role]["recorded"]]
        amax, scale = (_range(state[key] for state in recorded) for key in ("amax", "scale"))
        rows.append((role, str(len(recorded)), str(never), amax, scale))
    columns = ("role", "recorded", "never recorded", "amax", "scale")
    return Table("FP8 state by role", columns, rows)


def _range(values: Any) -> str:
    flat = [number for value in values for number in (value if isinstance(value, list) else [value])]
    return f"{min(flat):.4g} to {max(flat):.4g}" if flat else "-"
