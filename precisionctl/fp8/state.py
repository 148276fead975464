"""Fp8State: what Transformer Engine keeps for one GEMM, or for attention, under delayed scaling.

TE's words: `scale` multiplies before the cast (`fp8 = saturate(x * scale)`). `amax_history` has TE's
row order: row 0 is the step being recorded (zero at rest), row 1 the oldest, the last row the newest.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from precisionctl.codes.statistics import Statistics
from precisionctl.errors import DamagedCheckpoint, RecipeError
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

Role = Literal[
    "input", "weight", "output", "grad_output", "grad_input", "qkv", "s", "o", "d_o", "d_qkv", "d_p", "k", "v"
]
"""The role in its module of a tensor that is cast to FP8: in a GEMM, in attention, or in a KV cache."""

FORWARD: tuple[Role, ...] = ("input", "weight", "output")
BACKWARD: tuple[Role, ...] = ("grad_output", "grad_input")
ROLES: tuple[Role, ...] = FORWARD + BACKWARD
"""The roles of a GEMM, in the order of TE's columns."""
IN_USE: tuple[Role, ...] = ("input", "weight", "grad_output")
"""The roles of a GEMM that are cast to FP8. Its results are BF16 here, so `output` and `grad_input` never are."""

ATTENTION_FORWARD: tuple[Role, ...] = ("qkv", "s", "o")
"""The roles of attention (cpp_extensions/fused_attn.py, META_*): queries, keys and values; the softmax; its output."""
ATTENTION_BACKWARD: tuple[Role, ...] = ("d_o", "d_qkv", "d_p")
CACHE: tuple[Role, ...] = ("k", "v")
"""Keys (after rotary embedding) and values, as a KV cache stores them. TE has no state for these; the sidecar does."""
ATTENTION: tuple[Role, ...] = ATTENTION_FORWARD + ATTENTION_BACKWARD + CACHE

Fp8Format = Literal["HYBRID", "E4M3"]


@dataclass(frozen=True)
class DelayedScaling:
    """TE's DelayedScaling recipe, field for field (transformer_engine/common/recipe/__init__.py).

    Raises RecipeError for a field that TE would not accept or that makes no sense.
    """

    margin: int = 0
    fp8_format: Fp8Format = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        for name, accepted in _ACCEPTED.items():
            if not accepted(value := getattr(self, name)):
                short = isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 1 << 63)
                shown = repr(value)[:40] if short else f"a {type(value).__name__}"
                raise RecipeError(f"delayed scaling cannot have {shown} as its {name}")

    def dtype(self, role: Role) -> torch.dtype:
        """The dtype of a role's codes."""
        return code_dtype(self.fp8_format, role)


def code_dtype(fp8_format: Fp8Format, role: Role) -> torch.dtype:
    """The dtype of a role's codes: under HYBRID E4M3 forward and E5M2 backward, else E4M3."""
    if role in BACKWARD + ATTENTION_BACKWARD and fp8_format == "HYBRID":
        return torch.float8_e5m2
    return torch.float8_e4m3fn


def _is_integer(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _is_bool(value: object) -> bool:
    return type(value) is bool


MARGIN_LIMIT = 64
"""Largest absolute margin. Up to it `fp8_max * 2**-margin` is a normal FP32 number, and so is the scale of any likely
amax."""

_ACCEPTED: Mapping[str, Callable[[object], bool]] = {
    "margin": lambda value: _is_integer(value, -MARGIN_LIMIT, MARGIN_LIMIT),
    "fp8_format": lambda value: value in ("HYBRID", "E4M3"),
    "amax_history_len": lambda value: _is_integer(value, 1, 2**20),
    "amax_compute_algo": lambda value: value in ("max", "most_recent"),
    "reduce_amax": _is_bool,
    "fp8_dpa": _is_bool,
    "fp8_mha": _is_bool,
}


@dataclass(frozen=True)
class RoleState:
    """Scale and history of one role: FP32 `[]` and `[history]`, or `[experts]` and `[experts, history]`."""

    scale: Tensor
    amax_history: Tensor

    @staticmethod
    def fresh(history: int, shape: tuple[int, ...] = ()) -> RoleState:
        """What TE starts with: scale 1 and an all-zero history. `shape` is the scale's: `[]` or `[experts]`."""
        return RoleState(torch.ones(shape), torch.zeros(*shape, history))

    @property
    def recorded(self) -> bool:
        """False for scale 1 with an all-zero history: TE never saw this tensor."""
        return bool(self.recorded_each.any())

    @property
    def recorded_each(self) -> Tensor:
        """Whether each expert was ever recorded: bool, of the scale's shape."""
        return (self.scale != 1) | (self.amax_history != 0).any(-1)

    @staticmethod
    def stacked(parts: Sequence[RoleState]) -> RoleState:
        """The states of several of one role, along a new first dimension."""
        return RoleState(torch.stack([p.scale for p in parts]), torch.stack([p.amax_history for p in parts]))

    def replaced(self, where: Tensor, other: RoleState) -> RoleState:
        """This state, but `other`'s where `where` is True: bool of the scale's shape, `[]` or `[experts]`."""
        history = torch.where(where.unsqueeze(-1), other.amax_history, self.amax_history)
        return RoleState(torch.where(where, other.scale, self.scale), history)

    def check(self, where: object) -> None:
        """Raise DamagedCheckpoint for state that no run of TE can have produced. An infinite amax is possible. `where`
        names the place in the message."""
        scale, history = self.scale, self.amax_history
        if scale.dtype != torch.float32 or history.dtype != torch.float32:
            raise DamagedCheckpoint(f"FP8 state in {scale.dtype} and {history.dtype}, not FP32", where=where)
        if scale.dim() > 1 or history.dim() != scale.dim() + 1 or history.shape[:-1] != scale.shape:
            shapes = f"{list(scale.shape)} and {list(history.shape)}"
            raise DamagedCheckpoint(f"scale and amax_history have the shapes {shapes}", where=where)
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise DamagedCheckpoint("an FP8 scale is not a positive finite number", where=where)
        if history.shape[-1] == 0 or not bool((history >= 0).all()):
            raise DamagedCheckpoint("an amax history is empty or holds negative numbers or NaN", where=where)

    def resized(self, history: int) -> RoleState:
        """The same state with `history` rows: row 0, then the newest ones; zeros follow row 0 where there are
        too few. (TE's own resize keeps the oldest rows and puts its zeros where the newest belong.)"""
        old = self.amax_history
        kept = min(history, old.shape[-1]) - 1
        zeros = old.new_zeros(*old.shape[:-1], history - 1 - kept)
        newest = old[..., old.shape[-1] - kept :]
        return RoleState(self.scale, torch.cat([old[..., :1], zeros, newest], -1))


def core_attention_of(module: str) -> str | None:
    """The module that has the state of attention itself, of the attention whose output projection is `module`; None for
    other modules."""
    return f"{module.removesuffix('linear_proj')}core_attention" if module.endswith(_PROJECTION) else None


_PROJECTION = ".self_attention.linear_proj"


@dataclass(frozen=True)
class Fp8State:
    """FP8 state by role: all of ROLES for a GEMM, some of ATTENTION for a `core_attention`."""

    roles: Mapping[Role, RoleState]

    @property
    def of_gemm(self) -> bool:
        """Whether this is the state of a GEMM, or of several; not of attention."""
        return "weight" in self.roles

    @staticmethod
    def fresh(history: int, shape: tuple[int, ...] = ()) -> Fp8State:
        """The state that TE starts a GEMM with; arguments as of `RoleState.fresh`."""
        return Fp8State({role: RoleState.fresh(history, shape) for role in ROLES})

    @staticmethod
    def of_experts(states: Sequence[Fp8State]) -> Fp8State:
        """The states of a module's experts, `[]` each, stacked to one state of `[experts]`."""
        return Fp8State({role: RoleState.stacked([each.roles[role] for each in states]) for role in states[0].roles})

    def of_expert(self, index: int | slice) -> Fp8State:
        """The inverse of `of_experts`: the state of one, or of a slice of them."""
        return Fp8State({role: RoleState(p.scale[index], p.amax_history[index]) for role, p in self.roles.items()})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its scales: `[]`, or `[experts]`."""
        return tuple(next(iter(self.roles.values())).scale.shape)

    @staticmethod
    def merge(states: Iterable[Fp8State]) -> Fp8State:
        """One state for several parts: never-recorded parts are ignored; of the rest the elementwise
        maximum of the histories and the smallest scale, so that nothing saturates."""
        parts: dict[Role, list[RoleState]] = {}
        for state in states:
            for role, part in state.roles.items():
                parts.setdefault(role, []).append(part)
        roles = {}
        for role, listed in parts.items():
            stacked = RoleState.stacked(listed)
            recorded = stacked.recorded_each  # each expert by itself, where there are some
            scale = stacked.scale.masked_fill(~recorded, torch.inf).amin(0)
            roles[role] = RoleState(scale.where(recorded.any(0), 1.0), stacked.amax_history.amax(0))
        return Fp8State(roles)

    def check(self, recipe: DelayedScaling, where: object) -> None:
        """Raise DamagedCheckpoint unless every role is sound and its history has the recipe's length."""
        for role, part in self.roles.items():
            part.check(f"{where}, {role}")
            if part.amax_history.shape[-1] != recipe.amax_history_len:
                rows = part.amax_history.shape[-1]
                raise DamagedCheckpoint(
                    f"an amax history of {rows} rows under a recipe of {recipe.amax_history_len}",
                    where=f"{where}, {role}",
                )


BY_TE = "transformer_engine"
BY_RECORDER = "precisionctl's recorder in Megatron-Core"
BY_RECORDER_IN_TRANSFORMERS = "precisionctl's recorder in transformers"
BY_RUN = "precisionctl"
COLLECTED = "collected in BF16 training"
CALIBRATED = "precisionctl calibrate"
FIXED_SCALES = "input scales of "
"""The `producer`s of state that is known: TE's modules, which store no name; our recorders in other programs; an FP8
run here, or the weights alone; a BF16 run; `calibrate`; and, before the name of a method, the fixed input scales of an
FP8 checkpoint."""

RECORDED_IN_MEGATRON = (BY_TE, BY_RECORDER)
"""The `producer`s of state that was recorded in passes of Megatron-Core."""


@dataclass(frozen=True)
class Fp8States:
    """The delayed-scaling state of a whole checkpoint.

    `modules` is keyed by Megatron module name (`decoder.layers.0.mlp.linear_fc1`). `raw` keeps TE payloads that could
    not be decoded, byte for byte (uint8 `[bytes]`), by module. `producer` names what made the state (BY_TE and so on),
    and `iteration` is the step at which it was recorded.

    `of_weights` is the digest of the weights that the state was recorded with (conversion/weights_digest.py), None if
    no digest was taken; scales are valid for exactly these weights. `statistics`, by module and role, are measurements
    that only the sidecar can store. `notes` say what was assumed, merged or decided while reading; they are not stored.
    """

    recipe: DelayedScaling
    modules: Mapping[str, Fp8State]
    raw: Mapping[str, Tensor] = field(default_factory=dict)
    producer: str = ""
    iteration: int | None = None
    statistics: Mapping[str, Mapping[Role, Statistics]] = field(default_factory=dict)
    of_weights: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def of_gemms(self) -> bool:
        """Whether there is state of a GEMM, and not of attention alone."""
        return any(state.of_gemm for state in self.modules.values())

    @property
    def has_router_weights(self) -> bool:
        """Whether inputs of routed experts' linear_fc2 were recorded in Megatron-Core, which multiplies them by the
        router's weights. Engines, transformers and the trainer here multiply the outputs instead."""
        return self.producer in RECORDED_IN_MEGATRON and any(
            name.endswith(".mlp.experts.linear_fc2") for name in self.modules
        )

    def without(self, modules: Container[str]) -> Fp8States:
        """The same without these modules."""
        return replace(
            self,
            modules={name: state for name, state in self.modules.items() if name not in modules},
            raw={name: data for name, data in self.raw.items() if name not in modules},
            statistics={name: found for name, found in self.statistics.items() if name not in modules},
        )
