"""FP8 state as Megatron's `_extra_state` objects: the inverse of `megatron/fp8_state.py`."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from precisionctl.checkpoints.megatron.keys import EXTRA_STATE
from precisionctl.fp8 import grouped, sidecar
from precisionctl.fp8.extra_state_writer import TeVersion, columns_of, encode_columns, encode_payload, has_payload
from precisionctl.fp8.state import CACHE, Fp8State, Fp8States, core_attention_of
from precisionctl.torch_when_used import torch
from precisionctl.untrusted import safe_archive

if TYPE_CHECKING:
    from torch import Tensor

Object: TypeAlias = "Tensor | io.BytesIO"
"""A payload in the types that TE has used for it: a uint8 tensor `[bytes]`, or a file."""

_OF_RANK = re.compile(r"(.+)\.rank(\d+)")
_WEIGHT = re.compile(r"(.+)\.weight(\d*)")
_NONE = ("word_embeddings", "position_embeddings", "per_layer_embedding", "output_layer", "router", "conv1d")


def origin_entry(states: Fp8States) -> dict[str, object]:
    """The origin and digest of FP8 state, which payloads cannot store, as an entry of the common data."""
    return {
        "fp8_iteration": states.iteration,
        "fp8_producer": states.producer,
        "fp8_of_weights": states.of_weights,
    }


def demanded(names: Iterable[str]) -> list[str]:
    """The names of the `_extra_state` objects that some Megatron from 0.12 to 0.19 expects in a checkpoint of a model
    with these tensors.

    That is one for each Transformer Engine module with a weight, including norms (since Transformer Engine 1.13), and
    for attention (up to Megatron 0.14); in a hybrid stack (MambaModel), one for the output layer too. Megatron ignores
    those it does not expect.
    """
    names = list(names)
    found: dict[str, None] = {}
    if "decoder.final_norm.weight" in names:
        found[f"output_layer{EXTRA_STATE}"] = None
    for name in names:
        match = _WEIGHT.fullmatch(name)
        if match and not match[1].endswith(_NONE):
            found[f"{match[1]}{EXTRA_STATE}{match[2]}"] = None
            if core := core_attention_of(match[1]):
                found[f"{core}{EXTRA_STATE}"] = None
    return list(found)


def payloads_of(states: Fp8States, te: TeVersion, expert_ranks: int) -> dict[str, Object]:
    """The payloads of all modules by the objects' logical names, for torch_dist: of grouped linears one for each
    expert, cut as by Megatron on `expert_ranks` ranks."""
    found = _kept_objects(states)
    for module, state in _with_payload(states):
        if not _of_experts(state):
            found[module + EXTRA_STATE] = _payload(encode_payload(state, states.recipe, te))
            continue
        experts = len(state.roles["weight"].scale)
        size = experts // expert_ranks
        for first in range(0, experts, size):
            whole = columns_of(state.of_expert(slice(first, first + size)), states.recipe, te)
            for i, directions in enumerate(grouped.cut(whole, size)):
                data = encode_columns(directions, 1, states.recipe, te)
                found[f"{module}{EXTRA_STATE}{first + i}"] = _payload(data)
    return found


def grouped_payloads(states: Fp8States, te: TeVersion, rank: int, ranks: int, count: int) -> dict[str, Object]:
    """The payloads of all modules on expert rank `rank` of `ranks`, with `count` experts each: one for each grouped
    linear. One that could not be decoded goes to the rank that it is of, if there are as many ranks as it was cut for.
    """
    found, first = _kept_objects(states), rank * count
    kept = [(match[1], int(match[2])) for name in states.raw if (match := _OF_RANK.fullmatch(name))]
    for module, of_rank in kept:
        if of_rank == rank and sorted(r for name, r in kept if name == module) == list(range(ranks)):
            found[module + EXTRA_STATE] = _as_kept(states.raw[f"{module}.rank{rank}"])
    for module, state in _with_payload(states):
        part = state.of_expert(slice(first, first + count)) if _of_experts(state) else state
        found[module + EXTRA_STATE] = _payload(encode_payload(part, states.recipe, te))
    return found


def write_sidecar(directory: Path, states: Fp8States | None, *, live: bool) -> None:
    """Write the state into the sidecar. Of state that is `live`, write only what payloads cannot store: the roles of a
    KV cache, statistics, and undecoded payloads of grouped linears, which fit only as many ranks as they are of."""
    if states and live:
        caches = {
            module: Fp8State({role: part for role, part in state.roles.items() if role in CACHE})
            for module, state in states.modules.items()
        }
        kept = {module: state for module, state in caches.items() if state.roles}
        raw = {name: data for name, data in states.raw.items() if _OF_RANK.fullmatch(name)}
        states = replace(states, modules=kept, raw=raw) if kept or raw or states.statistics else None
    if states is not None:
        sidecar.write(directory / sidecar.RELATIVE, states)


def _with_payload(states: Fp8States) -> Iterable[tuple[str, Fp8State]]:
    return ((module, state) for module, state in states.modules.items() if has_payload(state))


def _of_experts(state: Fp8State) -> bool:
    return state.of_gemm and state.roles["weight"].scale.dim() == 1


def _payload(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _as_kept(data: Tensor) -> Object:
    """A payload that could not be decoded, in the type it had: TE stored archives as files, the rest as tensors."""
    kept = data.numpy().tobytes()
    return io.BytesIO(kept) if kept.startswith(safe_archive.MAGIC) else data


def _kept_objects(states: Fp8States) -> dict[str, Object]:
    """The payloads that could not be decoded, of modules and of experts (SavedPayload.raw_name), by the names of their
    objects."""
    found = {}
    for key, data in states.raw.items():
        if not _OF_RANK.fullmatch(key):
            module, _, number = key.rpartition(".")
            found[f"{module}{EXTRA_STATE}{number}" if number.isdecimal() else key + EXTRA_STATE] = _as_kept(data)
    return found
