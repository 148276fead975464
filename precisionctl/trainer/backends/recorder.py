"""Recorder: records in passes in BF16 what the casts of FP8 training would have recorded.

Warm-up passes, `calibrate` and `resume --collect-amax` are all this: while a backend has a recorder its GEMMs compute
in BF16 and show it their tensors, and each pass with gradients is a row of the histories, as each pass in FP8 is. Not
TE's own `calibrating=True`, which has recorded nothing in Linear and LayerNormLinear since 2.0: their quantizers are
None outside FP8 (linear.py, _get_quantizers).

Recorded are the roles that a GEMM casts: input, weight and grad_output. TE fills `output` and `grad_input` for GEMMs
that give out FP8 alone, and the roles of attention for attention in FP8, neither of which a trainer here has. Besides,
what a KV cache for inference would hold: `k` after rotary, and `v`. Padding is left out: FP8 training records it, but
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
from precisionctl.trainer.parallel.group_ranks import LOCAL_DISPATCH, TokenDispatch
from precisionctl.trainer.parallel.world import ALONE, World


class Recorder:
    """`precision` says which GEMMs an FP8 run would compute in FP8, and under which recipe of delayed scaling. While
    `measuring`, statistics are taken too, of a weight once."""

    def __init__(self, precision: Precision, device: torch.device, world: World = ALONE) -> None:
        self.precision, self.device, self._world = precision, device, world
        recipe = precision.delayed
        self._forward = ScalingBuffers(recipe.dtype("input"), recipe, device, world)
        self._backward = ScalingBuffers(recipe.dtype("grad_output"), recipe, device, world)
        self._slots: dict[str, dict[Role, Slot]] = {}
        self._padding_mask: Tensor | None = None
        self.measuring = False
        self._recomputing = False
        self.statistics: dict[str, dict[Role, Statistics]] = {}
        self.scattered: set[str] = set()
        """Modules of whose outputs each tensor rank sees its own tokens alone."""

    @contextmanager
    def forward_pass(self, padding_mask: Tensor | None = None) -> Iterator[None]:
        """A context for a pass over tokens `[B, S]`; `padding_mask`, bool of that shape, is False at padding. Without
        gradients nothing is recorded."""
        self._padding_mask = None if padding_mask is None or bool(padding_mask.all()) else padding_mask.flatten()
        yield
        self._padding_mask = None
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
    def reordered(self, tokens: Tensor, dispatch: TokenDispatch = LOCAL_DISPATCH) -> Iterator[None]:
        """A context for modules that see the pass's tokens in another order, or several times: `tokens` are their
        numbers. `dispatch` then sends those to their experts."""
        before = self._padding_mask
        if dispatch.order is not None:  # other ranks may have padding
            mask = torch.ones_like(tokens, dtype=torch.bool) if before is None else before[tokens]
            self._padding_mask = dispatch.dispatch(mask)
        else:
            self._padding_mask = None if before is None else before[tokens]
        yield
        self._padding_mask = before

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """A context for computing a pass once more: nothing is recorded, as it has been already."""
        self._recomputing = True
        try:
            yield
        finally:
            self._recomputing = False

    def gemm(self, module: str, values: Tensor, weight: Tensor, out: Tensor, scattered: bool = False) -> None:
        """Record a GEMM: values `[..., in]`, in FP32 where the cast would come before their rounding, weight
        `[out, in]` and its output `[..., out]`, whose gradient is recorded when it comes. Of an output that is
        `scattered` this tensor rank has its own tokens alone."""
        if not self._wants(module):
            return
        mask = mask_out = self._padding_mask
        if scattered and mask is not None:
            mask_out = self._world.tensor.local_tokens(mask)
        if scattered and self._world.tensor.sequence:
            self.scattered.add(module)
        self._record(module, "input", _without_padding(values, mask))
        self._record(module, "weight", weight)
        if out.requires_grad:
            out.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: self._record(module, "grad_output", _without_padding(gradient, mask_out))
            )

    def grouped_gemm(
        self, module: str, values: Tensor, counts: Sequence[int], weights: Sequence[Tensor], out: Tensor
    ) -> None:
        """Record one GEMM for each of this rank's experts: values `[tokens, in]` and out `[tokens, out]`, `counts[0]`
        of the first one and so on, and the experts' weights `[out, in]`."""
        if not self._wants(module):
            return
        mask = self._padding_mask
        self._record(module, "input", _by_expert(values, counts, mask))
        self._record(module, "weight", weights)
        if out.requires_grad:
            out.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: self._record(module, "grad_output", _by_expert(gradient, counts, mask))
            )

    def kv_cache(self, module: str, role: Role, values: Tensor) -> None:
        """Record what a KV cache would hold, `[B, S, ..., channels]`; several parts under one scale in several calls.
        All layers are recorded, whatever their GEMMs compute in."""
        if torch.is_grad_enabled():
            self._record(module, role, _without_padding(values, self._padding_mask))

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
        """Continue from states, under the recorder's own recipe."""
        for module, state in states.items():
            for role, part in state.roles.items():
                self._slot(module, role, part.scale).set_state(part)

    def _wants(self, module: str) -> bool:
        return torch.is_grad_enabled() and self.precision.in_fp8(module)

    @torch.no_grad()
    def _record(self, module: str, role: Role, seen: Tensor | Sequence[Tensor]) -> None:
        """Record a tensor, or one of each of this rank's experts."""
        if self._recomputing:
            return
        if isinstance(seen, Tensor):
            amax, parts, here = numerics.amax(seen), [seen], None
        else:  # of all experts: 0 for those of other ranks, whose amaxes come with the next all-reduce
            amax, parts = torch.zeros(len(seen) * self._world.experts.size, device=self.device), [*seen]
            numbers = self._world.experts.local_experts(len(amax))
            here = slice(numbers.start, numbers.stop)
            amax[here] = torch.stack([numerics.amax(one) for one in seen])
        slot = self._slot(module, role, amax)
        found = self.statistics.setdefault(module, {}) if self.measuring else {}
        if self.measuring and not (role == "weight" and role in found):
            for part, scale in zip(parts, slot.scale[here], strict=True):
                delayed = scale if scale != 1 else None  # 1 is that of no pass
                one = measure(part, slot.buffers.dtype, delayed, square=role == "weight")
                found[role] = found[role].merge(one) if role in found else one
        slot.record(amax)

    def _slot(self, module: str, role: Role, like: Tensor) -> Slot:
        """Where a role is recorded; made for a scale of the shape of `like`."""
        slots = self._slots.setdefault(module, {})
        if role not in slots:
            buffers = self._backward if role in BACKWARD + ATTENTION_BACKWARD else self._forward
            slots[role] = buffers.add_slot(len(like) if like.dim() else None)
        return slots[role]


def _without_padding(values: Tensor, mask: Tensor | None) -> Tensor:
    """The tokens of `[B, S, ...]` or `[T, ...]` that are no padding. They are looked at alone: a layer that is computed
    once more keeps nothing for a backward that it would not keep then."""
    values = values.detach()
    return values if mask is None else values.reshape(len(mask), -1, values.shape[-1])[mask]


def _by_expert(values: Tensor, counts: Sequence[int], mask: Tensor | None) -> Sequence[Tensor]:
    """The tokens of each expert that are no padding."""
    parts = torch.split(values.detach(), list(counts))
    if mask is None:
        return parts
    return [part[mine] for part, mine in zip(parts, torch.split(mask, list(counts)), strict=True)]
