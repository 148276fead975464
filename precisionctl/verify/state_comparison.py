"""FP8 state of two checkpoints compared: the recipe, and scales and amax histories of each role."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from precisionctl.fp8.state import Fp8State, Fp8States
from precisionctl.sizes import counted
from precisionctl.torch_when_used import torch
from precisionctl.verify.not_compared import NotCompared, of_keys

if TYPE_CHECKING:
    from torch import Tensor


def compare_states(
    a: Fp8States | None, b: Fp8States | None, *, one_sided: bool, of_weights: bool = True
) -> tuple[tuple[str, ...] | None, list[NotCompared]]:
    """A line for each difference of FP8 state, None where nothing is compared, and what is left out; `one_sided` says
    that state which only one side has is a difference. Without `of_weights` the weight role is left out: an export for
    Transformer Engine has it of the weights that it has written, whatever was recorded."""
    if a and b:
        recorded = [word for word in ("producer", "iteration") if getattr(a, word) != getattr(b, word)]
        kinds = [(a.statistics.get(name, {}).keys(), b.statistics.get(name, {}).keys()) for name in a.modules]
        if lone := sum(len(mine ^ others) for mine, others in kinds):
            recorded.append(f"{lone} statistics")
        not_compared = of_keys("recording", recorded)
        if not of_weights:
            others = _without_weights(a), _without_weights(b)
            found = tuple(_state_differences(*others))
            if differing := len(tuple(_state_differences(a, b))) - len(found):
                not_compared.append(NotCompared("scales of weights", counted(differing, "weight")))
            return found, not_compared
        return tuple(_state_differences(a, b)), not_compared
    if a is b:
        return None, []
    having, lacking = ("A", "B") if a else ("B", "A")
    if one_sided:
        return (f"no FP8 state in {lacking}",), []
    return None, [NotCompared("FP8 state", f"only {having} has any")]


def _without_weights(states: Fp8States) -> Fp8States:
    modules = {
        name: Fp8State({role: part for role, part in state.roles.items() if role != "weight"})
        for name, state in states.modules.items()
    }
    return replace(states, modules=modules)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    left, right = (each.contiguous().view(-1).view(torch.uint8) for each in (a, b))
    return torch.equal(left, right)


def _state_differences(a: Fp8States, b: Fp8States) -> Iterator[str]:
    """A line for each difference; equal means equal to the last bit."""
    left, right = asdict(a.recipe), asdict(b.recipe)
    yield from (f"recipe: {key} is {left[key]} and {right[key]}" for key in left if left[key] != right[key])
    for name in sorted(a.modules.keys() ^ b.modules.keys()):
        yield f"{name}: only in {'A' if name in a.modules else 'B'}"
    for name in sorted(a.modules.keys() & b.modules.keys()):
        of_a, of_b = a.modules[name].roles, b.modules[name].roles
        for role in sorted(of_a.keys() | of_b.keys()):
            one, other = of_a.get(role), of_b.get(role)
            if one is None or other is None:
                yield f"{name} {role}: only in {'A' if other is None else 'B'}"
            elif not _same_bits(one.scale, other.scale):
                yield f"{name} {role}: scale is {one.scale.tolist()} and {other.scale.tolist()}"
            elif not _same_bits(one.amax_history, other.amax_history):
                yield f"{name} {role}: the amax histories differ"
    for name in sorted(a.raw.keys() | b.raw.keys()):
        if name not in a.raw or name not in b.raw or not _same_bits(a.raw[name], b.raw[name]):
            yield f"{name}: payloads that were not understood differ"
    for name in sorted(a.statistics.keys() & b.statistics.keys()):
        measured, others = a.statistics[name], b.statistics[name]
        for role in sorted(measured.keys() & others.keys()):
            if measured[role].as_row() != others[role].as_row():
                yield f"{name} {role}: the statistics differ"
