"""Fp8State: what Transformer Engine keeps for one GEMM under delayed scaling.

TE's words: `scale` multiplies before the cast (`fp8 = saturate(x * scale)`). `amax_history` has TE's
row order: row 0 is the step being recorded (zero at rest), row 1 the oldest, the last row the newest.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Role = Literal["input", "weight", "output", "grad_output", "grad_input"]
FORWARD: tuple[Role, ...] = ("input", "weight", "output")
BACKWARD: tuple[Role, ...] = ("grad_output", "grad_input")
ROLES: tuple[Role, ...] = FORWARD + BACKWARD


@dataclass(frozen=True)
class DelayedScaling:
    """TE's DelayedScaling recipe, field for field (transformer_engine/common/recipe/__init__.py)."""

    margin: int = 0
    fp8_format: Literal["HYBRID", "E4M3"] = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def dtype(self, role: Role) -> torch.dtype:
        """HYBRID is E4M3 forward and E5M2 backward."""
        if role in BACKWARD and self.fp8_format == "HYBRID":
            return torch.float8_e5m2
        return torch.float8_e4m3fn


@dataclass(frozen=True)
class RoleState:
    """Scale and history of one role: FP32 `[]` and `[history]`, or `[experts]` and `[experts, history]`."""

    scale: Tensor
    amax_history: Tensor

    @staticmethod
    def fresh(history: int) -> "RoleState":
        """What TE starts with: scale 1 and an all-zero history."""
        return RoleState(torch.ones(()), torch.zeros(history))

    @property
    def recorded(self) -> bool:
        """False for scale 1 with an all-zero history: TE never saw this tensor."""
        return bool((self.scale != 1).any() or (self.amax_history != 0).any())


@dataclass(frozen=True)
class Fp8State:
    """FP8 state of one GEMM, by role."""

    roles: Mapping[Role, RoleState]

    @staticmethod
    def fresh(history: int) -> "Fp8State":
        return Fp8State({role: RoleState.fresh(history) for role in ROLES})

    @staticmethod
    def merge(states: "Iterable[Fp8State]") -> "Fp8State":
        """One state for several parts: never-recorded parts are ignored; of the rest the elementwise
        maximum of the histories and the smallest scale, so that nothing saturates."""
        listed = list(states)
        return Fp8State({role: _merge_roles([s.roles[role] for s in listed]) for role in ROLES})


def _merge_roles(parts: list[RoleState]) -> RoleState:
    recorded = [part for part in parts if part.recorded] or parts[:1]
    return RoleState(
        torch.stack([part.scale for part in recorded]).amin(0),
        torch.stack([part.amax_history for part in recorded]).amax(0),
    )


@dataclass(frozen=True)
class Fp8States:
    """The delayed-scaling state of a whole checkpoint.

    `modules` is keyed by Megatron module name (`decoder.layers.0.mlp.linear_fc1`). `raw` keeps, byte for
    byte, payloads that were not understood. `iteration` is the step at which the state was recorded.
    """

    recipe: DelayedScaling
    modules: Mapping[str, Fp8State]
    raw: Mapping[str, Tensor] = field(default_factory=dict)
    producer: str = ""
    iteration: int | None = None
