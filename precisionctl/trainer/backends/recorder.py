"""Recorder: what the casts of FP8 training would have recorded, taken from passes in BF16.

Warm-up passes, `calibrate` and `resume --collect-amax` are all this: while a backend has a recorder its GEMMs compute
in BF16 and show it their tensors, and each pass with gradients is a row of the histories, as each pass in FP8 is. Not
TE's own `calibrating=True`, which has recorded nothing in Linear and LayerNormLinear since 2.0: their quantizers are
None outside FP8 (linear.py, _get_quantizers).

Recorded are the roles that a GEMM casts: input, weight and grad_output. TE fills `output` and `grad_input` for GEMMs
that give out FP8 alone, and the roles of attention for attention in FP8, neither of which a trainer here has. Besides,
what a cache for inference would hold: `k` after rotary, and `v`. Padding takes no part: FP8 training records it, but
nothing is lost by clamping what no target ever sees.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from precisionctl.fp8 import numerics
from precisionctl.fp8.health import measure
from precisionctl.fp8.state import ATTENTION_BACKWARD, BACKWARD, ROLES, Fp8State, Role, RoleState
from precisionctl.fp8.statistics import Statistics
from precisionctl.precision import Precision
from precisionctl.trainer.backends.scaling_buffers import ScalingBuffers, Slot
from precisionctl.trainer.parallel.group_ranks import AT_HOME, Dispatch
from precisionctl.trainer.parallel.world import ALONE, World

Seen = Tensor | Sequence[Tensor]
"""A tensor, or one of each expert."""


class Recorder:
    """`precision` says which GEMMs an FP8 run would compute in FP8, and under which recipe of delayed scaling. While
    `measuring`, statistics are taken too, of a weight once."""

    def __init__(self, precision: Precision, device: torch.device, world: World = ALONE) -> None:
        self.precision, self.device, self._world = precision, device, world
        recipe = precision.delayed
        self._forward = ScalingBuffers(recipe.dtype("input"), recipe, device, world)
        self._backward = ScalingBuffers(recipe.dtype("grad_output"), recipe, device, world)
        self._slots: dict[str, dict[Role, Slot]] = {}
        self._real: Tensor | None = None
        self.measuring = False
        self._silent = False
        self.statistics: dict[str, dict[Role, Statistics]] = {}
        self.scattered: set[str] = set()
        """Modules of whose outputs each tensor rank is shown its own tokens alone."""

    @contextmanager
    def forward_pass(self, real: Tensor | None = None) -> Iterator[None]:
        """A context for a pass over tokens `[B, S]`; `real`, bool of that shape, is False at padding. Without gradients
        nothing is recorded."""
        self._real = None if real is None or bool(real.all()) else real.flatten()
        yield
        self._real = None
        if torch.is_grad_enabled():
            self._forward.update()

    def after_backward(self) -> None:
        """Called when a pass's gradients are complete."""
        self._backward.update()

    def forget_infinite(self, skipped: Tensor) -> None:
        """As `Backend.forget_infinite`."""
        self._forward.forget_infinite(skipped)
        self._backward.forget_infinite(skipped)

    @contextmanager
    def arranged(self, tokens: Tensor, dispatch: Dispatch = AT_HOME) -> Iterator[None]:
        """A context for modules that see the pass's tokens in another order, or several times: `tokens` are their
        numbers. `dispatch` then sends those to their experts."""
        before = self._real
        if dispatch.order is not None:  # other ranks may have padding
            real = torch.ones_like(tokens, dtype=torch.bool) if before is None else before[tokens]
            self._real = dispatch.there(real)
        else:
            self._real = None if before is None else before[tokens]
        yield
        self._real = before

    @contextmanager
    def computed_again(self) -> Iterator[None]:
        """A context for computing a pass once more: nothing is recorded, as it has been already."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def gemm(self, module: str, values: Tensor, weight: Tensor, out: Tensor, scattered: bool = False) -> None:
        """Be shown a GEMM: values `[..., in]`, in FP32 where the cast would come before their rounding, weight
        `[out, in]` and its output `[..., out]`, whose gradient is recorded when it comes. Of an output that is
        `scattered` this tensor rank has its tokens."""
        if not self._wants(module):
            return
        real = self._real
        real_out = self._world.tensor.mine(real) if scattered and real is not None else real
        if scattered and self._world.tensor.sequence:
            self.scattered.add(module)
        self._take(module, "input", _only(values, real))
        self._take(module, "weight", weight)
        if out.requires_grad:
            out.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: self._take(module, "grad_output", _only(gradient, real_out))
            )

    def grouped_gemm(
        self, module: str, values: Tensor, counts: Sequence[int], weights: Sequence[Tensor], out: Tensor
    ) -> None:
        """Be shown one GEMM for each of this rank's experts: values `[tokens, in]` and out `[tokens, out]`, `counts[0]`
        of the first one and so on, and the experts' weights `[out, in]`."""
        if not self._wants(module):
            return
        real = self._real
        self._take(module, "input", _by_expert(values, counts, real))
        self._take(module, "weight", weights)
        if out.requires_grad:
            out.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: self._take(module, "grad_output", _by_expert(gradient, counts, real))
            )

    def cached(self, module: str, role: Role, values: Tensor) -> None:
        """Be shown what an inference cache would hold, `[B, S, ..., channels]`; several parts under one scale in
        several calls. All layers are recorded, whatever their GEMMs compute in."""
        if torch.is_grad_enabled():
            self._take(module, role, _only(values, self._real))

    def states(self) -> dict[str, Fp8State]:
        """What is recorded, by module; of a GEMM all roles, as TE keeps them."""
        length = self.precision.delayed.amax_history_len
        made = {}
        for module, slots in self._slots.items():
            roles = {role: slot.state for role, slot in slots.items()}
            if "weight" in roles:
                shape = tuple(roles["weight"].scale.shape)
                fresh = RoleState(torch.ones(shape), torch.zeros(*shape, length))
                roles = {role: roles.get(role, fresh) for role in ROLES}
            made[module] = Fp8State(roles)
        return made

    def load(self, states: Mapping[str, Fp8State]) -> None:
        """Go on from states, under the recorder's own recipe."""
        for module, state in states.items():
            for role, part in state.roles.items():
                self._slot(module, role, part.scale).set_state(part)

    def _wants(self, module: str) -> bool:
        return torch.is_grad_enabled() and self.precision.in_fp8(module)

    @torch.no_grad()
    def _take(self, module: str, role: Role, seen: Seen) -> None:
        if self._silent:
            return
        amax = numerics.amax(seen) if isinstance(seen, Tensor) else self._of_experts(seen)
        slot = self._slot(module, role, amax)
        if self.measuring:
            self._measure(module, role, seen, slot)
        slot.record(amax)

    def _of_experts(self, seen: Sequence[Tensor]) -> Tensor:
        """Amaxes of all experts, `[experts]`: 0 for those of other ranks, whose amaxes come when all have met."""
        amaxes = torch.zeros(len(seen) * self._world.experts.size, device=self.device)
        amaxes[self._mine(amaxes)] = torch.stack([numerics.amax(one) for one in seen])
        return amaxes

    def _mine(self, of_experts: Tensor) -> slice:
        """Where this rank's experts are in `[experts]`."""
        numbers = self._world.experts.mine(len(of_experts))
        return slice(numbers.start, numbers.stop)

    def _measure(self, module: str, role: Role, seen: Seen, slot: Slot) -> None:
        found = self.statistics.setdefault(module, {})
        if role == "weight" and role in found:
            return
        if isinstance(seen, Tensor):
            parts, scales = [seen], slot.scale[None]
        else:
            parts, scales = [*seen], slot.scale[self._mine(slot.scale)]
        for part, scale in zip(parts, scales, strict=True):
            delayed = scale if scale != 1 else None  # 1 is that of no pass
            one = measure(part, slot.buffers.dtype, delayed, square=role == "weight")
            found[role] = found[role].merge(one) if role in found else one

    def _slot(self, module: str, role: Role, like: Tensor) -> Slot:
        """Where a role is recorded; made for a scale of the shape of `like`."""
        slots = self._slots.setdefault(module, {})
        if role not in slots:
            buffers = self._backward if role in BACKWARD + ATTENTION_BACKWARD else self._forward
            slots[role] = buffers.add_slot(len(like) if like.dim() else None)
        return slots[role]


def _only(values: Tensor, real: Tensor | None) -> Tensor:
    """The tokens of `[B, S, ...]` or `[T, ...]` that are no padding. They are looked at alone: a layer that is computed
    once more keeps nothing for a backward that it would not keep then."""
    values = values.detach()
    return values if real is None else values.reshape(len(real), -1, values.shape[-1])[real]


def _by_expert(values: Tensor, counts: Sequence[int], real: Tensor | None) -> Sequence[Tensor]:
    """The tokens of each expert that are no padding."""
    parts = torch.split(values.detach(), list(counts))
    if real is None:
        return parts
    return [part[mine] for part, mine in zip(parts, torch.split(real, list(counts)), strict=True)]
