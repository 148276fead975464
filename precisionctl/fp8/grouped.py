"""The columns of a grouped linear's state: the order they are in, and how Megatron cuts them into experts.

Transformer Engine has had two orders (pytorch/module/grouped_linear.py, `_offsets`). Up to 2.2 columns were ordered by
role, `[input 0, input 1, ..., weight 0, ...]`: here `role`. Since 2.3 they are ordered by GEMM (one for each expert),
`[input 0, weight 0, output 0, input 1, ...]`: here `gemm`. Megatron's `torch_dist` checkpoints hold a payload for each
expert, cut as if the order were always `role` (TEGroupedLinear, `_split_extra_state`): column r of expert i of N is
column r * N + i of the linear, even where that column belongs to another expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from precisionctl.errors import DamagedCheckpoint
from precisionctl.fp8.state import BACKWARD, FORWARD, Fp8State, Role, RoleState
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

ColumnOrder = Literal["role", "gemm"]


class Columns(NamedTuple):
    """What TE keeps for one direction: FP32 `[columns]` and `[history, columns]`."""

    scale: Tensor
    history: Tensor


Directions = tuple[Columns, Columns]
"""Forward and backward."""


def check_columns(directions: Directions, forward: int, backward: int, where: object) -> None:
    """Raise DamagedCheckpoint unless there are so many columns of each direction."""
    found = tuple(len(columns.scale) for columns in directions)
    if found != (forward, backward):
        what = f"FP8 state with {found[0]} columns forward and {found[1]} backward, not {forward} and {backward}"
        raise DamagedCheckpoint(what, where=where)


def by_gemm(directions: Directions, gemms: int, order: ColumnOrder, where: object) -> Fp8State:
    """The state of a grouped linear, with scales `[gemms]`, from TE's columns in this order. Raises DamagedCheckpoint
    for a wrong number of columns."""
    check_columns(directions, len(FORWARD) * gemms, len(BACKWARD) * gemms, where)
    forward, backward = directions
    return Fp8State({**_by_role(forward, FORWARD, gemms, order), **_by_role(backward, BACKWARD, gemms, order)})


def _by_role(columns: Columns, roles: tuple[Role, ...], gemms: int, order: ColumnOrder) -> dict[Role, RoleState]:
    numbers = torch.arange(len(roles) * gemms)
    # [roles, gemms]: the number of the column of each role of each GEMM
    places = numbers.view(-1, gemms) if order == "role" else numbers.view(gemms, -1).t()
    return {
        role: RoleState(columns.scale[at].clone(), columns.history[:, at].t().contiguous())
        for role, at in zip(roles, places, strict=True)
    }


def in_columns(state: Fp8State, order: ColumnOrder) -> Directions:
    """The inverse of `by_gemm`. A state of one GEMM has the same columns in either order."""
    found = []
    for roles in (FORWARD, BACKWARD):
        scale = torch.stack([state.roles[role].scale.reshape(-1) for role in roles])
        histories = [state.roles[role].amax_history for role in roles]
        history = torch.stack([each.reshape(-1, each.shape[-1]) for each in histories])  # [roles, gemms, history]
        if order == "gemm":
            scale, history = scale.t(), history.transpose(0, 1)
        found.append(Columns(scale.flatten(), history.flatten(0, 1).t().contiguous()))
    return found[0], found[1]


def order_of(directions: Directions, gemms: int, where: object) -> ColumnOrder | None:
    """The order of the columns, inferred from which of them were recorded: no version of TE records `output` or
    `grad_input` of a grouped linear. None if both orders are possible, or neither. Raises as `by_gemm`.
    """
    if gemms == 1:
        return "gemm"  # both orders are the same
    fitting: list[ColumnOrder] = []
    orders: tuple[ColumnOrder, ...] = ("role", "gemm")
    for order in orders:
        roles = by_gemm(directions, gemms, order, where).roles
        if not roles["output"].recorded and not roles["grad_input"].recorded:
            fitting.append(order)
    if len(fitting) == 2 and not any(part.recorded for part in roles.values()):
        return "gemm"  # nothing was recorded, so the order does not matter
    return fitting[0] if len(fitting) == 1 else None


def cut(directions: Directions, experts: int) -> list[Directions]:
    """The columns of each expert's payload, cut out of a grouped linear's as Megatron does."""
    return [tuple(Columns(c.scale[i::experts], c.history[:, i::experts]) for c in directions) for i in range(experts)]  # type: ignore[misc]


def joined(parts: list[Directions]) -> Directions:
    """The inverse of `cut`."""
    found = []
    for columns in zip(*parts, strict=True):
        scale = torch.stack([each.scale for each in columns], 1).flatten()
        history = torch.stack([each.history for each in columns], 2).flatten(1)
        found.append(Columns(scale, history))
    return found[0], found[1]
