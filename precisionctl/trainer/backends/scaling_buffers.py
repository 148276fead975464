"""ScalingBuffers: the delayed-scaling state of many tensors side by side, so that one call updates all of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from precisionctl.fp8 import numerics
from precisionctl.fp8.state import DelayedScaling, RoleState
from precisionctl.trainer.parallel.world import ALONE, World


class ScalingBuffers:
    """State of tensors of one code dtype: `state.scale` is FP32 `[room]`, `state.amax_history` `[room, history]`.

    There is room for more tensors than have a slot; an update changes nothing that was never recorded. All ranks of
    `world` have the same tensors and the same state, as each update all-reduces the amaxes.
    """

    def __init__(self, dtype: torch.dtype, recipe: DelayedScaling, device: torch.device, world: World = ALONE) -> None:
        self.dtype, self.recipe, self._world = dtype, recipe, world
        self.state = RoleState(torch.ones(0, device=device), torch.zeros(0, recipe.amax_history_len, device=device))
        self._taken = 0

    def add_slot(self, experts: int | None = None) -> "Slot":
        """A slot for one tensor, or for one of each expert."""
        first = self._taken
        self._taken += 1 if experts is None else experts
        if (missing := self._taken - len(self.state.scale)) > 0:
            scale, history = self.state.scale, self.state.amax_history
            rows = max(missing, len(scale))  # doubled: a model may have tens of thousands
            self.state = RoleState(
                torch.cat([scale, scale.new_ones(rows)]),
                torch.cat([history, history.new_zeros(rows, history.shape[1])]),
            )
        return Slot(self, first if experts is None else slice(first, self._taken))

    def update(self) -> None:
        row_0 = self.state.amax_history[:, 0]
        row_0.copy_(self._world.all_reduce_max(row_0))
        self.state = numerics.update_delayed(self.state, self.dtype, self.recipe)

    @contextmanager
    def recomputing(self, scale: Tensor) -> Iterator[None]:
        """A context for computing a pass once more: values are cast with the scales of that pass, `[room]`, and their
        amaxes are dropped, as the history has them already."""
        now = self.state
        self.state = RoleState(scale, torch.zeros(len(scale), 1, device=scale.device))
        try:
            yield
        finally:
            self.state = now

    def discard_row_0(self) -> None:
        self.state.amax_history[:, 0] = 0

    def forget_infinite(self, skipped: Tensor) -> None:
        """As `Backend.forget_infinite`."""
        history = numerics.without_infinite(self.state.amax_history, skipped)
        self.state = RoleState(self.state.scale, history)


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in the buffers: a number, or a slice where there is one for each expert."""

    buffers: ScalingBuffers
    place: int | slice

    @property
    def scale(self) -> Tensor:
        """FP32 `[]` or `[experts]`."""
        return self.buffers.state.scale[self.place]

    def record(self, amax: Tensor) -> None:
        """Record an amax, FP32 `[]` or `[experts]`, in row 0, the running step's; the largest of a step counts."""
        row_0 = self.buffers.state.amax_history[self.place, 0]
        row_0.copy_(torch.fmax(row_0, amax))

    @property
    def view(self) -> RoleState:
        """A view, true until the next update."""
        return RoleState(self.scale, self.buffers.state.amax_history[self.place])

    @property
    def state(self) -> RoleState:
        """A copy, on the CPU."""
        return RoleState(self.view.scale.cpu().clone(), self.view.amax_history.cpu().clone())

    def set_state(self, new: RoleState) -> None:
        """Set the state; of a history of another length, the newest rows."""
        self.buffers.state.scale[self.place] = new.scale
        self.buffers.state.amax_history[self.place] = new.resized(self.buffers.recipe.amax_history_len).amax_history
