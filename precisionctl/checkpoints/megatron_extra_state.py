"""FP8 state in Megatron's `_extra_state` objects: which modules have one, and what is in them.

Experts have one each, named here as their tensors are: `….mlp.experts.linear_fc1._extra_state5`. Their states
are one `Fp8State` of `[experts]`.
"""

import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from precisionctl.checkpoints.megatron_keys import EXTRA_STATE, OURS
from precisionctl.errors import DamagedCheckpoint, NotUnderstood
from precisionctl.fp8 import extra_state
from precisionctl.fp8.state import ROLES, DelayedScaling, Fp8State, Fp8States, RoleState

_NAME = re.compile(r"(.+)\._extra_state(\d{1,9})?")
_WEIGHT = re.compile(r"(.+)\.weight(\d*)")
_NONE = ("word_embeddings", "position_embeddings", "output_layer", "router")
_ATTENTION = ".self_attention.linear_proj"


def demanded(names: Iterable[str]) -> list[str]:
    """The objects that some Megatron from 0.12 to 0.19 asks for, of a model with these tensors.

    Every module of Transformer Engine's specifications that has a weight, norms too (since Transformer Engine
    1.13), and the attention itself (up to Megatron 0.14). Megatron passes over those it does not ask for.
    """
    found: dict[str, None] = {}
    for name in names:
        match = _WEIGHT.fullmatch(name)
        if match and not match[1].endswith(_NONE):
            found[f"{match[1]}{EXTRA_STATE}{match[2]}"] = None
            if match[1].endswith(_ATTENTION):
                found[f"{match[1].removesuffix('linear_proj')}core_attention{EXTRA_STATE}"] = None
    return list(found)


def payloads_of(states: Fp8States) -> dict[str, Tensor]:
    """The payloads of all modules, uint8, by the objects' logical names."""
    found = {object_of(module): data for module, data in states.raw.items()}
    for module, state in _with_payload(states):
        for number, one in _by_expert(state):
            data = bytearray(extra_state.encode_payload(one, states.recipe))
            found[f"{module}{EXTRA_STATE}{number}"] = torch.frombuffer(data, dtype=torch.uint8)
    return found


def grouped_payloads(states: Fp8States, first: int, count: int) -> dict[str, Tensor]:
    """The payloads of all modules as a rank with experts `[first, first + count)` has them: one of a grouped linear."""
    found = {object_of(module): data for module, data in states.raw.items()}
    for module, state in _with_payload(states):
        part = state
        if state.of_gemm and state.roles["weight"].scale.dim():
            held = slice(first, first + count)
            parts = {role: RoleState(p.scale[held], p.amax_history[held]) for role, p in state.roles.items()}
            part = Fp8State(parts)
        data = bytearray(extra_state.encode_payload(part, states.recipe))
        found[module + EXTRA_STATE] = torch.frombuffer(data, dtype=torch.uint8)
    return found


def _with_payload(states: Fp8States) -> Iterable[tuple[str, Fp8State]]:
    return ((module, state) for module, state in states.modules.items() if extra_state.has_payload(state))


def _by_expert(state: Fp8State) -> Iterable[tuple[str, Fp8State]]:
    counts = {part.scale.shape for part in state.roles.values()}
    if counts == {torch.Size()}:
        return [("", state)]
    return [(str(index), _expert(state, index)) for index in range(min(shape[0] for shape in counts))]


def _expert(state: Fp8State, index: int) -> Fp8State:
    return Fp8State({role: RoleState(p.scale[index], p.amax_history[index]) for role, p in state.roles.items()})


@dataclass(frozen=True)
class Decoded:
    """What payloads say: `modules` as in Fp8States, and `raw` those that are not understood."""

    recipe: DelayedScaling | None
    modules: Mapping[str, Fp8State]
    raw: Mapping[str, Tensor]


def decode(payloads: Mapping[str, bytes], where: Path) -> Decoded:
    """The states in these payloads (by the objects' logical names).

    Raises DamagedCheckpoint where their recipes differ, or they are not what Transformer Engine writes.
    """
    recipe: DelayedScaling | None = None
    states: dict[str, Fp8State] = {}
    raw: dict[str, Tensor] = {}
    for name, payload in payloads.items():
        try:
            decoded = extra_state.decode_payload(payload, f"{where}: {name}")
        except NotUnderstood:
            raw[_module(name)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            continue
        if decoded:
            recipe = _same_recipe(recipe, decoded[0], f"{where}: {name}")
            states[name] = decoded[1]
    return Decoded(recipe, _by_module(states, where), raw)


def split_experts(name: str, payload: bytes, rank: int, where: str) -> Iterable[tuple[str, bytes]]:
    """A grouped linear's payload as one for each expert, numbered as those of this expert-parallel rank.

    Raises NotUnderstood and DamagedCheckpoint, as `extra_state.decode_payload`.
    """
    decoded = extra_state.decode_payload(payload, where, grouped=True)
    if decoded is None:
        return []
    recipe, state = decoded
    parts = [one for _, one in _by_expert(state)]
    return [(f"{name}{rank * len(parts) + i}", extra_state.encode_payload(p, recipe)) for i, p in enumerate(parts)]


def _by_module(states: Mapping[str, Fp8State], where: Path) -> dict[str, Fp8State]:
    modules: dict[str, Fp8State] = {}
    experts: dict[str, dict[int, Fp8State]] = {}
    for name, state in states.items():
        match = _NAME.fullmatch(name)
        assert match
        if match[2] is None:
            modules[match[1]] = state
        else:
            experts.setdefault(match[1], {})[int(match[2])] = state
    for module, by_number in experts.items():
        if sorted(by_number) != list(range(len(by_number))):
            raise DamagedCheckpoint(f"only some experts of {module} have FP8 state", where=where)
        listed = [by_number[number] for number in range(len(by_number))]
        modules[module] = Fp8State({role: _stacked([state.roles[role] for state in listed]) for role in ROLES})
    return modules


def _stacked(parts: list[RoleState]) -> RoleState:
    return RoleState(torch.stack([p.scale for p in parts]), torch.stack([p.amax_history for p in parts]))


def _same_recipe(known: DelayedScaling | None, recipe: DelayedScaling, where: str) -> DelayedScaling:
    if known not in (None, recipe):
        raise DamagedCheckpoint(f"its FP8 recipe {recipe} is not the other modules' {known}", where=where)
    return recipe


def _module(name: str) -> str:
    """How Fp8States calls the module of a payload that is not understood: experts' by number, `….linear_fc1.5`."""
    match = _NAME.fullmatch(name)
    assert match
    return match[1] if match[2] is None else f"{match[1]}.{match[2]}"


def object_of(module: str) -> str:
    """The inverse of `_module`."""
    name, _, number = module.rpartition(".")
    return f"{name}{EXTRA_STATE}{number}" if number.isdecimal() else module + EXTRA_STATE


def bytes_of(value: Any, where: str) -> bytes:
    """The payload in an object. Raises DamagedCheckpoint for what is none."""
    data = value.getvalue() if isinstance(value, io.BytesIO) else value  # TE 1.x kept a file
    if isinstance(data, Tensor):
        data = data.reshape(-1).view(torch.uint8).numpy().tobytes()
    if data and not isinstance(data, bytes):
        raise DamagedCheckpoint(f"{where} holds no bytes", where=where)
    return data or b""


def as_states(decoded: Decoded, common: Mapping[str, Any], iteration: int | None) -> Fp8States | None:
    """The states of a checkpoint, with what its common data says of them; None where there are none."""
    if not decoded.modules and not decoded.raw:
        return None
    recorded = common.get(OURS)  # what a payload has no place for
    ours = recorded if isinstance(recorded, dict) else {}
    return Fp8States(
        decoded.recipe or DelayedScaling(),
        decoded.modules,
        decoded.raw,
        ours.get("fp8_producer", "transformer_engine"),
        ours.get("fp8_iteration", iteration),
    )
