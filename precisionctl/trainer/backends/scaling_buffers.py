"""ScalingBuffers: the delayed-scaling state of many tensors side by side, so that one call updates all of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from precisionctl.fp8 import delayed_scaling
from precisionctl.fp8.state import DelayedScaling, RoleState
from precisionctl.trainer.parallel.world import ALONE, World


class ScalingBuffers:
    """State of many tensors with one code dtype: `state.scale` is FP32 `[capacity]`, `state.amax_history` `[capacity,
    history]`.

    The capacity may exceed the number of slots; an update does not change what was never recorded. All ranks of `world`
    have the same tensors and the same state, as each update all-reduces the amaxes.
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
            rows = max(missing, len(scale))  # doubling, as a model may have tens of thousands of tensors
            self.state = RoleState(
                torch.cat([scale, scale.new_ones(rows)]),
                torch.cat([history, history.new_zeros(rows, history.shape[1])]),
            )
        return Slot(self, first if experts is None else slice(first, self._taken))

    def update(self) -> None:
        """End a pass: all-reduce its amaxes, and compute the next scales (`delayed_scaling.update_delayed`)."""
        if not self._taken:  # nothing is in FP8, on any rank
            return
        row_0 = self.state.amax_history[:, 0]
        row_0.copy_(self._world.all_reduce_max(row_0))
        self.state = delayed_scaling.update_delayed(self.state, self.dtype, self.recipe)

    @contextmanager
    def recomputing(self, scale: Tensor) -> Iterator[None]:
        """A context for recomputing a pass in the backward: values are cast with the scales of that pass, `[capacity]`,
        and amaxes are not recorded again."""
        now = self.state
        self.state = RoleState(scale, torch.zeros(len(scale), 1, device=scale.device))
        try:
            yield
        finally:
            self.state = now

    def discard_row_0(self) -> None:
        """Drop the amaxes of the running pass."""
        self.state.amax_history[:, 0] = 0

    def forget_infinite(self, skipped: Tensor) -> None:
        """As `Backend.forget_infinite`."""
        history = delayed_scaling.without_infinite(self.state.amax_history, skipped)
        self.state = RoleState(self.state.scale, history)


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in the buffers: an index, or a slice with one entry for each expert."""

    buffers: ScalingBuffers
    place: int | slice

    @property
    def scale(self) -> Tensor:
        """FP32 `[]` or `[experts]`."""
        return self.buffers.state.scale[self.place]

    def record(self, amax: Tensor) -> None:
        """Record an amax, FP32 `[]` or `[experts]`, in row 0 of the history; the largest of a pass is kept."""
        row_0 = self.buffers.state.amax_history[self.place, 0]
        row_0.copy_(torch.fmax(row_0, amax))

    @property
    def view(self) -> RoleState:
        """A view of the state, valid until the next update."""
        return RoleState(self.scale, self.buffers.state.amax_history[self.place])

    @property
    def state(self) -> RoleState:
        """A copy of the state on the CPU."""
        return RoleState(self.view.scale.cpu().clone(), self.view.amax_history.cpu().clone())

    def set_state(self, new: RoleState) -> None:
        """Set the state; of a history of another length the newest rows are kept."""
        self.buffers.state.scale[self.place] = new.scale
        self.buffers.state.amax_history[self.place] = new.resized(self.buffers.recipe.amax_history_len).amax_history
