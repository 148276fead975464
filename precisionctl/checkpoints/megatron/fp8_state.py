"""FP8 state from the `_extra_state` payloads (`payloads.py`) of all ranks and experts of a Megatron checkpoint.

Experts have a payload each; their states become one `Fp8State` of `[experts]`. `fp8_state_writer.py` is the inverse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from precisionctl.checkpoints.megatron.keys import OURS
from precisionctl.checkpoints.megatron.payloads import SavedPayload
from precisionctl.errors import DamagedCheckpoint, NotUnderstood, PrecisionError, RecipeError
from precisionctl.fp8 import grouped
from precisionctl.fp8.delayed_scaling import change_recipe
from precisionctl.fp8.extra_state import Payload, read_payload
from precisionctl.fp8.grouped import ColumnOrder, Directions
from precisionctl.fp8.state import BY_TE, CACHE, DelayedScaling, Fp8State, Fp8States, RoleState
from precisionctl.sizes import counted
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

_CORE_ATTENTION = ".core_attention"
StateKey = TypeVar("StateKey")


@dataclass(frozen=True)
class ExpertPayloads:
    """How the payloads of experts were made. `ranks` is the number of expert-parallel ranks if experts were grouped
    linears, whose payloads Megatron cuts into one for each expert; None if each expert was a linear of its own. `order`
    is that of a grouped linear's columns, if the user gave it."""

    ranks: int | None = None
    order: ColumnOrder | None = None


@dataclass
class Decoded:
    """Decoded payloads: `recipe`, `modules` and `raw` as in Fp8States; `notes` say what was assumed, merged or
    decided."""

    recipe: DelayedScaling | None = None
    modules: dict[str, Fp8State] = field(default_factory=dict)
    raw: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def decode_payloads(
    saved: Iterable[SavedPayload],
    where: Path,
    experts: ExpertPayloads = ExpertPayloads(),
    args: Mapping[str, Any] | None = None,
) -> Decoded:
    """The states in these payloads of the checkpoint `where`. Different states of one module, from ranks that did not
    reduce their amaxes, are merged (Fp8State.merge). Megatron's `args` supply what a payload of TE 1.x does not say of
    its recipe.

    Raises DamagedCheckpoint where recipes of GEMMs differ or payloads are not what Transformer Engine writes,
    UnsafePickle, and PrecisionError where the order of a grouped linear's columns cannot be determined.
    """
    return _Decoding(where, experts, _recipe_fields(args or {})).decode(saved)


class _Decoding:
    """Collects payloads by module. Those of several ranks are merged as they are read, so that memory does not grow
    with the number of ranks."""

    def __init__(self, where: Path, experts: ExpertPayloads, recipe_fields: Mapping[str, Any]) -> None:
        self._where, self._experts, self._recipe_fields = where, experts, recipe_fields
        self._found = Decoded()
        self._by_rank: dict[str, dict[int, Fp8State]] = {}
        self._by_expert: dict[str, dict[int, Fp8State]] = {}
        self._cut: dict[str, dict[int, Payload]] = {}
        self._assumed: set[str] = set()
        self._orders: dict[ColumnOrder, set[str]] = {}
        self._differ: set[str] = set()

    def decode(self, saved: Iterable[SavedPayload]) -> Decoded:
        postponed = []
        for one in saved:
            if self._found.recipe is None and one.module.endswith(_CORE_ATTENTION):  # the recipe is that of GEMMs
                postponed.append(one)
            else:
                self._add(one)
        for one in postponed:
            self._add(one)

        parts = [(module, numbered, torch.cat) for module, numbered in self._by_rank.items()]
        parts += [(module, numbered, torch.stack) for module, numbered in self._by_expert.items()]
        for module, numbered, join in parts:
            self._check_numbers(module, numbered)
            self._found.modules[module] = _joined([numbered[number] for number in range(len(numbered))], join)

        for module, payloads in self._cut.items():
            # Megatron cut these out of the payload that a rank has for all its experts
            self._check_numbers(module, payloads)
            count, cut = len(payloads), payloads[0].cut
            size = cut.experts if cut else count // (self._experts.ranks or count)
            if size == 0 or count % size:
                raise DamagedCheckpoint(f"{count} experts of {module} in linears of {size}", where=self._where)
            of_ranks, where = list[Fp8State](), f"{self._where}: {module}"
            for first in range(0, count, size):
                group = [payloads[number] for number in range(first, first + size)]
                cut_from = group[0].cut
                whole = cut_from.whole if cut_from else grouped.joined([payload.directions for payload in group])
                order = self._order(module, group[0], whole, size)
                of_ranks.append(grouped.by_gemm(whole, size, order, where))
                of_ranks[-1].check(group[0].recipe, where)
            self._found.modules[module] = _joined(of_ranks, torch.cat)

        self._found.notes.extend(self._notes())
        return self._found

    def _add(self, one: SavedPayload) -> None:
        """Decode a payload, or keep its bytes if it is valid and of an unknown form."""
        where = f"{one.where}: {one.name}"
        try:
            payload = read_payload(one.data, where)
            if payload is not None:
                self._collect(one, payload, where)
        except NotUnderstood as error:
            name = one.raw_name
            self._found.raw[name] = torch.frombuffer(bytearray(one.data), dtype=torch.uint8)
            self._found.notes.append(f"Kept byte for byte: {name}, {error.what}.")

    def _collect(self, one: SavedPayload, payload: Payload, where: str) -> None:
        """Add a payload to those of the same module. Raises NotUnderstood for a form that is not known."""
        if payload.assumed:
            payload = replace(payload, recipe=replace(payload.recipe, **self._recipe_fields))
        attention = one.module.endswith(_CORE_ATTENTION)
        if payload.gemms == 3 and not attention and one.expert_rank is None:
            raise NotUnderstood("FP8 state of three GEMMs", where=where)
        if attention and self._found.recipe not in (None, payload.recipe):
            raise NotUnderstood("FP8 state of attention under a recipe of its own", where=where)
        if one.expert_rank is None:
            state = payload.state(where)
        else:
            order = self._order(one.module, payload, payload.directions, payload.gemms)
            state = payload.group(order, where)
        if self._found.recipe not in (None, payload.recipe):
            what = f"its FP8 recipe {payload.recipe} is not the other modules' {self._found.recipe}"
            raise DamagedCheckpoint(what, where=where)
        self._found.recipe = payload.recipe
        if payload.assumed:
            self._assumed.add(one.module)
        if one.expert_rank is not None:
            self._merge(one.module, self._by_rank.setdefault(one.module, {}), one.expert_rank, state, where)
        elif one.expert is None:
            self._merge(one.module, self._found.modules, one.module, state, where)
        elif payload.cut or self._experts.ranks:
            kept = payload if payload.cut is None or payload.cut.expert == 0 else replace(payload, cut=None)
            self._cut.setdefault(one.module, {})[one.expert] = kept
        else:
            self._merge(one.module, self._by_expert.setdefault(one.module, {}), one.expert, state, where)

    def _merge(self, module: str, states: dict[StateKey, Fp8State], key: StateKey, state: Fp8State, where: str) -> None:
        """Store a state, merged with that of another rank if there is one and it differs."""
        known = states.get(key)
        if known is not None:
            sizes, others = ({role: part.scale.shape for role, part in each.roles.items()} for each in (known, state))
            if sizes != others:
                raise DamagedCheckpoint("its FP8 state is of other GEMMs than another rank's", where=where)
            equal = all(
                torch.equal(part.scale, state.roles[role].scale)
                and torch.equal(part.amax_history, state.roles[role].amax_history)
                for role, part in known.roles.items()
            )
            if not equal:
                self._differ.add(module)
                state = Fp8State.merge([known, state])
        states[key] = state

    def _order(self, module: str, payload: Payload, directions: Directions, gemms: int) -> ColumnOrder:
        """The order of columns: given by the user, else known from the payload's version of TE, else inferred from the
        numbers. Raises PrecisionError if it remains unknown, and DamagedCheckpoint for a wrong number of columns."""
        where = f"{self._where}: {module}"
        order = self._experts.order or payload.order or grouped.order_of(directions, gemms, where)
        if order is None:
            raise PrecisionError(
                f"the FP8 state of {module}'s experts does not show which order its columns are in",
                where=self._where,
                do="--grouped-columns gemm if Transformer Engine 2.3 or newer wrote it, role if 1.9 to 2.2 did; "
                "or --drop-fp8-state.",
            )
        if gemms > 1:
            self._orders.setdefault(order, set()).add(module)
        return order

    def _check_numbers(self, module: str, numbered: Mapping[int, object]) -> None:
        if sorted(numbered) != list(range(len(numbered))):
            raise DamagedCheckpoint(f"only some experts of {module} have FP8 state", where=self._where)

    def _notes(self) -> Iterator[str]:
        if self._assumed:
            known = bool(self._recipe_fields)
            rest = "the rest from the run's arguments" if known else "margin 0 and algorithm max are assumed"
            yield (
                f"FP8 state of {counted(len(self._assumed), 'module')} is of TE before 2.0 and has no recipe: "
                f"format and history length are known from it, {rest}. --recipe says otherwise."
            )
        if self._differ:
            yield (
                f"FP8 state of {counted(len(self._differ), 'module')} differs between ranks, which did not reduce "
                "their amaxes: the largest amaxes and the smallest scales are taken."
            )
        for order, modules in self._orders.items():
            what = {"role": "role by role, as TE up to 2.2", "gemm": "expert by expert, as TE since 2.3"}[order]
            told = ", as told" if self._experts.order else ""
            yield f"FP8 state of the experts in {counted(len(modules), 'module')} is read {what}{told}."


def _recipe_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the FP8 recipe that Megatron's arguments give; none if the run was not in FP8."""
    if args.get("fp8") not in ("hybrid", "e4m3"):
        return {}
    fields = {
        "margin": args.get("fp8_margin"),
        "amax_compute_algo": args.get("fp8_amax_compute_algo"),
        "fp8_dpa": args.get("fp8_dot_product_attention", False),
        "fp8_mha": args.get("fp8_multi_head_attention", False),
    }
    try:
        DelayedScaling(**fields)
    except RecipeError:  # values of another version of Megatron
        return {}
    return fields


def _joined(states: list[Fp8State], join: Any) -> Fp8State:
    """States of experts as one of `[experts]`: `join` is torch.cat or torch.stack."""
    parts = {role: [state.roles[role] for state in states] for role in states[0].roles}
    return Fp8State(
        {
            role: RoleState(join([part.scale for part in each]), join([part.amax_history for part in each]))
            for role, each in parts.items()
        }
    )


def as_states(
    decoded: Decoded, common: Mapping[str, Any], iteration: int | None, sidecar_state: Fp8States | None
) -> Fp8States | None:
    """The FP8 state of a checkpoint: from its payloads, with origin and digest from its common data, else from its
    sidecar. None if there is none."""
    if not decoded.modules and not decoded.raw:
        return sidecar_state
    recorded = common.get(OURS)  # payloads cannot store these
    ours = recorded if isinstance(recorded, dict) else {}
    producer, recorded_at = ours.get("fp8_producer"), ours.get("fp8_iteration", iteration)
    weights = ours.get("fp8_of_weights")
    states = Fp8States(
        decoded.recipe or DelayedScaling(),
        decoded.modules,
        decoded.raw,
        producer if type(producer) is str else BY_TE,
        recorded_at if type(recorded_at) is int else None,
        of_weights=weights if type(weights) is str else None,
        notes=tuple(decoded.notes),
    )
    these = (states.of_weights, states.iteration)
    if sidecar_state is None or (sidecar_state.of_weights, sidecar_state.iteration) != these:
        return states
    # The sidecar of the same state has what payloads cannot store
    modules = dict(states.modules)
    for name, state in sidecar_state.modules.items():
        cache = Fp8State({role: part for role, part in state.roles.items() if role in CACHE})
        if cache.roles:
            known = modules[name].roles if name in modules else {}
            modules[name] = Fp8State({**known, **change_recipe(cache, sidecar_state.recipe, states.recipe).roles})
    return replace(
        states, modules=modules, raw={**sidecar_state.raw, **states.raw}, statistics=sidecar_state.statistics
    )
