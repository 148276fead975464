"""Recorder: records, in BF16 passes, the amaxes that FP8 training would have recorded.

Warm-up passes, `calibrate`, `resume --collect-amax`, the guard and phases in BF16 use it. While a backend has a
recorder, its GEMMs compute in BF16 and pass it their tensors, and each pass with gradients fills one row of the
histories, like a pass in FP8. TE's own `calibrating=True` does not serve: since 2.0 it records nothing in Linear and
LayerNormLinear, whose quantizers are None outside FP8 (linear.py, _get_quantizers).

The roles that a GEMM casts are recorded: input, weight and grad_output. TE uses `output` and `grad_input` only for
GEMMs with FP8 results, and the roles of attention for attention in FP8; the trainer has neither. Also recorded is what
a KV cache for inference would hold: `k` after rotary embedding, and `v`. Unlike in FP8 training, padding is left out:
no target depends on it, so it does no harm if it is clipped.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from precisionctl.codes import numerics
from precisionctl.codes.health import measure
from precisionctl.codes.statistics import Statistics
from precisionctl.fp8.state import ATTENTION_BACKWARD, BACKWARD, ROLES, Fp8State, Role, RoleState
from precisionctl.precision import Precision
from precisionctl.trainer.backends.scaling_buffers import ScalingBuffers, Slot
from precisionctl.trainer.parallel.group_ranks import TokenDispatch
from precisionctl.trainer.parallel.world import ALONE, World


class Recorder:
    """Records GEMMs that `precision` puts in FP8, under its recipe of delayed scaling. While `measuring` is True it
    also takes `statistics`, of each weight only once."""

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
        """Modules whose outputs have different tokens on each tensor rank."""

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
        """To be called when the gradients of a pass are complete."""
        self._backward.update()

    def forget_infinite(self, skipped: Tensor) -> None:
        """As `Backend.forget_infinite`."""
        self._forward.forget_infinite(skipped)
        self._backward.forget_infinite(skipped)

    @contextmanager
    def reordered(self, tokens: Tensor, dispatch: TokenDispatch) -> Iterator[None]:
        """A context for modules that get the pass's tokens in another order, or several times: `tokens` are their
        numbers in the pass. `dispatch` then sends them to their experts' ranks."""
        before = self._padding_mask
        if dispatch.order is not None:  # a mask even if this rank has no padding, as others may have some
            mask = torch.ones_like(tokens, dtype=torch.bool) if before is None else before[tokens]
            self._padding_mask = dispatch.dispatch(mask)
        else:
            self._padding_mask = None if before is None else before[tokens]
        yield
        self._padding_mask = before

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """A context for recomputing a pass in the backward, in which nothing is recorded again."""
        self._recomputing = True
        try:
            yield
        finally:
            self._recomputing = False

    def gemm(self, module: str, values: Tensor, weight: Tensor, out: Tensor, scattered: bool = False) -> None:
        """Record a GEMM: `values` `[..., in]` (FP32 if FP8 would cast them before rounding), `weight` `[out, in]` and,
        in the backward, the gradient of `out` `[..., out]`. With `scattered`, this tensor rank has only its own tokens
        of the output."""
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
        """Record one GEMM for each of this rank's experts: `values` `[tokens, in]` and `out` `[tokens, out]`, sorted by
        expert with `counts[i]` tokens of the i-th, and the experts' weights `[out, in]`."""
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
        """Record keys or values that a KV cache would hold, `[B, S, ..., channels]`. Several calls for a role count as
        one tensor. All layers are recorded, whatever precision their GEMMs have."""
        if torch.is_grad_enabled():
            self._record(module, role, _without_padding(values, self._padding_mask))

    def states(self) -> dict[str, Fp8State]:
        """The recorded state by module. A GEMM has all five roles, as in TE."""
        length = self.precision.delayed.amax_history_len
        made = {}
        for module, slots in self._slots.items():
            roles = {role: slot.state for role, slot in slots.items()}
            if "weight" in roles:
                fresh = RoleState.fresh(length, tuple(roles["weight"].scale.shape))
                roles = {role: roles.get(role, fresh) for role in ROLES}
            made[module] = Fp8State(roles)
        return made

    def load(self, states: Mapping[str, Fp8State]) -> None:
        """Continue from states that are under the recorder's recipe."""
        for module, state in states.items():
            for role, part in state.roles.items():
                self._slot(module, role, part.scale).set_state(part)

    def go_on_from(self, merged: Mapping[str, Mapping[Role, Statistics]]) -> None:
        """Let statistics that are merged over all ranks be those so far. The first rank keeps them; the others know
        which weights are measured."""
        if self._world.first:
            self.statistics = {module: dict(roles) for module, roles in merged.items()}
        else:
            self.statistics = {
                module: {"weight": Statistics()} for module, roles in merged.items() if "weight" in roles
            }

    def _wants(self, module: str) -> bool:
        return torch.is_grad_enabled() and self.precision.in_fp8(module)

    @torch.no_grad()
    def _record(self, module: str, role: Role, seen: Tensor | Sequence[Tensor]) -> None:
        """Record a tensor, or one tensor for each of this rank's experts."""
        if self._recomputing:
            return
        if isinstance(seen, Tensor):
            amax, parts, here = numerics.amax(seen), [seen], None
        else:  # amaxes of all experts: those of other ranks are 0 until the next all-reduce
            amax, parts = torch.zeros(len(seen) * self._world.experts.size, device=self.device), [*seen]
            numbers = self._world.experts.local_experts(len(amax))
            here = slice(numbers.start, numbers.stop)
            amax[here] = torch.stack([numerics.amax(one) for one in seen])
        slot = self._slot(module, role, amax)
        found = self.statistics.setdefault(module, {}) if self.measuring else {}
        if self.measuring and not (role == "weight" and role in found):
            for part, scale in zip(parts, slot.scale[here], strict=True):
                delayed = scale if scale != 1 else None  # 1 means that no pass has set it
                one = measure(part, slot.buffers.dtype, delayed, square=role == "weight")
                found[role] = found[role].merge(one) if role in found else one
        slot.record(amax)

    def record_pass(self, amaxes: Mapping[tuple[str, Role], Tensor]) -> None:
        """Record a whole pass of tensors that are not shown: their amaxes by module and role, `[]` of any dtype. One
        that is NaN counts as not recorded."""
        found = torch.stack([amax.to(self.device, torch.float32, non_blocking=True) for amax in amaxes.values()])
        found = torch.where(found.isnan(), 0.0, found)
        slots = [self._slot(module, role, found[0]) for module, role in amaxes]
        for buffers in (self._forward, self._backward):
            here = [number for number, slot in enumerate(slots) if slot.buffers is buffers]
            buffers.state.amax_history[[slots[number].place for number in here], 0] = found[here]
            buffers.update()

    def _slot(self, module: str, role: Role, like: Tensor) -> Slot:
        """The slot of a role, created for a scale of the shape of `like` if needed."""
        slots = self._slots.setdefault(module, {})
        if role not in slots:
            buffers = self._backward if role in BACKWARD + ATTENTION_BACKWARD else self._forward
            slots[role] = buffers.add_slot(len(like) if like.dim() else None)
        return slots[role]


def _without_padding(values: Tensor, mask: Tensor | None) -> Tensor:
    """The tokens of `[B, S, ...]` or `[T, ...]` that are not padding. Detached, so that under activation recomputation
    both passes save the same tensors for the backward."""
    values = values.detach()
    return values if mask is None else values.reshape(len(mask), -1, values.shape[-1])[mask]


def _by_expert(values: Tensor, counts: Sequence[int], mask: Tensor | None) -> Sequence[Tensor]:
    """The tokens of each expert that are not padding."""
    parts = torch.split(values.detach(), list(counts))
    if mask is None:
        return parts
    return [part[mine] for part, mine in zip(parts, torch.split(mask, list(counts)), strict=True)]
