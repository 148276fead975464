"""Judge what was measured and recorded of every role by the thresholds, and give a verdict for each scaling."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from precisionctl.codes.statistics import FP8_SCALINGS, NAMES, Loss, Scaling, Statistics
from precisionctl.fp8.carry import is_stale
from precisionctl.fp8.state import ATTENTION, BACKWARD, IN_USE, ROLES, Fp8States, Role
from precisionctl.precision import Precision
from precisionctl.readiness.four_bits import FourBitCost
from precisionctl.readiness.history import History, read_history
from precisionctl.readiness.patterns import shortened
from precisionctl.readiness.thresholds import FEWEST, GROWTH, KURTOSIS, SATURATION, STALE, UNDERFLOW
from precisionctl.sizes import counted

Remedy = Literal["repair", "bf16", "recalibrate", "margin", "watch"]


@dataclass(frozen=True)
class RoleFinding:
    """A problem of a role under `scalings`, in words, and its remedy. Findings of one `kind` differ only in their
    numbers."""

    remedy: Remedy
    kind: str
    scalings: tuple[Scaling, ...]
    words: str


@dataclass(frozen=True)
class RoleHealth:
    """One role of one module. `measured` has statistics, one for each expert if they were measured separately; empty if
    nothing was measured. The properties are those of the worst expert, None without statistics."""

    module: str
    role: Role
    measured: Sequence[Statistics]
    history: History | None
    findings: tuple[RoleFinding, ...]

    @property
    def amax(self) -> float | None:
        """The largest amax, measured or recorded."""
        seen = [one.amax for one in self.measured] + ([self.history.largest] if self.history else [])
        return max(seen, default=None)

    @property
    def kurtosis(self) -> float | None:
        return max((one.kurtosis for one in self.measured if not math.isnan(one.kurtosis)), default=None)

    def underflow(self, scaling: Scaling) -> float | None:
        return max((loss.underflow for loss in self._losses(scaling)), default=None)

    def saturation(self, scaling: Scaling) -> float | None:
        return max((loss.saturation for loss in self._losses(scaling)), default=None)

    def sqnr(self, scaling: Scaling) -> float | None:
        return min((loss.sqnr for loss in self._losses(scaling)), default=None)

    def _losses(self, scaling: Scaling) -> list[Loss]:
        return [one.losses[scaling] for one in self.measured if one.losses[scaling].elements]


@dataclass(frozen=True)
class Verdict:
    """The verdict on one scaling. `broken` is the number of modules in which something is NaN or infinite. `keep_bf16`
    are patterns for a recipe, which match `kept` modules. `recalibrate` is the number of modules whose state should not
    be used, and `margin` the number of modules that saturate. `unjudged` has, by role, the number of modules about
    which nothing is known, and `stayed` is the number of others, not judged, that the run kept in BF16."""

    scaling: Scaling
    modules: int
    broken: int
    keep_bf16: tuple[str, ...]
    kept: int
    recalibrate: int
    margin: int
    unjudged: Mapping[Role, int]
    stayed: int = 0

    @property
    def ready(self) -> bool:
        """Whether there is anything to be FP8, everything is known and finite, and no state has to be calibrated
        first."""
        return self.modules > self.kept and not self.broken and not self.recalibrate and not self.unjudged

    @property
    def words(self) -> str:
        if not self.modules:
            return "nothing to judge: no module would be in FP8"
        if self.broken:
            return f"not ready: NaN or infinity in {counted(self.broken, 'module')}, which no precision mends"
        if self.kept == self.modules:
            return "not ready: every module has to stay in BF16"
        in_bf16 = f"with {self.kept} of {self.modules} modules in BF16" if self.kept else "all modules in FP8"
        if self.stayed:
            in_bf16 += f", but for {self.stayed} that the run kept in BF16"
        if self.margin:
            in_bf16 += f"; {self.margin} saturate and want a margin, or current scaling"
        if self.recalibrate:
            return f"calibrate first ({counted(self.recalibrate, 'module')}), then {in_bf16}"
        if self.unjudged:
            return f"not known yet; so far {in_bf16}"
        return f"ready, {in_bf16}"


@dataclass(frozen=True)
class Readiness:
    """The health of every role of every module, a verdict for each scaling, what four bits would cost, if that was
    measured, and notes on the state as a whole. `can_calibrate` is whether `calibrate` can run the model, which needs a
    table of its family."""

    roles: tuple[RoleHealth, ...]
    verdicts: Mapping[Scaling, Verdict]
    four_bits: FourBitCost | None = None
    notes: tuple[str, ...] = ()
    can_calibrate: bool = True

    @property
    def measured(self) -> Mapping[Role, int]:
        """The number of modules with statistics, by role."""
        return dict(Counter(health.role for health in self.roles if health.measured))

    @property
    def passes(self) -> int | None:
        """The number of recorded passes (or steps) that the verdicts on activations and gradients rest on: the fewest
        of any module; None if nothing was recorded."""
        return min(self._passes, default=None)

    @property
    def most_passes(self) -> int | None:
        """The same, the most of any module. An expert without tokens misses a pass."""
        return max(self._passes, default=None)

    @property
    def misfits(self) -> tuple[str, ...]:
        """Patterns of the modules whose sizes no FP8 GEMM takes under delayed scaling, and so under none."""
        return shortened(_misfits("delayed", self.roles), list(dict.fromkeys(health.module for health in self.roles)))

    @property
    def _passes(self) -> list[int]:
        histories = (health.history for health in self.roles if health.role in IN_USE and health.role != "weight")
        return [history.rows for history in histories if history]


def judge(
    gemms: Mapping[str, Sequence[int]],
    weights: Mapping[str, Sequence[Statistics]],
    states: Fp8States | None,
    *,
    outdated: str | None = None,
) -> Readiness:
    """Judge the modules `gemms`, which would be in FP8 and have weights of these shapes, by statistics of the weights
    and by what `states` recorded and measured. `outdated` says why `states` are not of these weights, if
    they are not, as `why_outdated` does."""
    others = sorted((states.modules.keys() | states.statistics.keys()) - set(gemms)) if states else []
    roles: list[RoleHealth] = []
    for module in (*gemms, *others):
        state = states.modules.get(module) if states else None
        known: set[Role] = {role for role, part in state.roles.items() if part.recorded} if state else set()
        known |= states.statistics.get(module, {}).keys() if states else set()
        shape, measured = gemms.get(module, ()), weights.get(module, ())
        for role in ROLES + ATTENTION:
            if role in known or (module in weights and role in IN_USE):
                roles.append(_judge_role(module, role, shape, measured, states, outdated))
    return Readiness(tuple(roles), {scaling: _verdict(scaling, gemms, roles, states) for scaling in FP8_SCALINGS})


def _judge_role(
    module: str,
    role: Role,
    shape: Sequence[int],
    weights: Sequence[Statistics],
    states: Fp8States | None,
    outdated: str | None,
) -> RoleHealth:
    state = states.modules.get(module) if states else None
    part = state.roles.get(role) if state else None
    measured_before = states.statistics.get(module, {}).get(role) if states else None
    measured = weights if role == "weight" else (measured_before,) if measured_before else ()
    measured = [one for one in measured if one.elements]

    # a weight that FP8 GEMMs do not take, whatever its values are
    sized = {scaling: Precision(fp8=True, scaling=scaling).misfit(shape) for scaling in FP8_SCALINGS}
    misfits = {scaling: words for scaling, words in sized.items() if words}
    findings: list[RoleFinding] = []
    if misfits and role == "weight":
        words = f"{list(shape)}: {', '.join(dict.fromkeys(misfits.values()))}"
        findings.append(RoleFinding("bf16", _SIZES["delayed" in misfits], tuple(misfits), words))

    findings += _by_statistics(measured, role)
    history = None
    never = [] if _is_all_zero(measured) else [_NEVER]  # the amax of a tensor of zeros is never recorded
    if states and not part and role in IN_USE:
        findings += never
    if states and part:
        history = read_history(part, role, states.recipe)
        findings += _by_history(history) if history else never
        if history and outdated:
            findings.append(RoleFinding("recalibrate", "outdated", ("delayed",), outdated))
        elif role == "weight" and history and len(measured) == part.scale.numel():
            own = torch.tensor([one.amax for one in measured]).reshape(part.scale.shape)
            if bool(is_stale(part, own, states.recipe).any()):
                words = f"the recorded amax is more than {STALE.shown} off the weights' own"
                findings.append(RoleFinding("recalibrate", "stale", ("delayed",), words))
    if "delayed" in misfits:  # nothing records a module that no FP8 GEMM takes
        findings = [finding for finding in findings if finding.remedy != "recalibrate"]
    return RoleHealth(module, role, measured, history, tuple(findings))


_SIZES = ("size under MXFP8", "size")
_NEVER = RoleFinding("recalibrate", "never recorded", ("delayed",), "never recorded")


def _is_all_zero(measured: Sequence[Statistics]) -> bool:
    """Whether something was measured, and every element of it is 0."""
    return bool(measured) and all(one.amax == 0 for one in measured)


def _by_statistics(measured: Sequence[Statistics], role: Role) -> Iterator[RoleFinding]:
    if not measured:
        return
    if _is_all_zero(measured):
        yield RoleFinding("watch", "dead", FP8_SCALINGS, "dead: every element is 0")
    if any(one.nonfinite for one in measured):
        number = counted(sum(one.nonfinite for one in measured), "element is", "elements are")
        yield RoleFinding("repair", "not finite", FP8_SCALINGS, f"{number} NaN or infinite, in BF16 too")
        return  # what else is measured of it would advise a precision, and none helps
    losses = {scaling: [one.losses[scaling] for one in measured] for scaling in FP8_SCALINGS}
    zeros = {scaling: max(loss.underflow for loss in each) for scaling, each in losses.items()}
    if beyond := {scaling: share for scaling, share in zeros.items() if share > UNDERFLOW.value}:
        listed = ", ".join(f"{NAMES[scaling]} {share:.1%}" for scaling, share in beyond.items())
        yield RoleFinding("bf16", "zeros", tuple(beyond), f"elements become 0: {listed}")
    clamped = [loss.saturation for loss in losses["delayed"] if loss.saturated >= FEWEST.value]
    if (share := max(clamped, default=0.0)) > SATURATION.value:
        yield RoleFinding("margin", "saturation", ("delayed",), f"elements saturate: {share:.3%}")
    kurtosis = max((one.kurtosis for one in measured if one.amax > 0), default=0.0)
    if kurtosis > KURTOSIS.value and role not in BACKWARD:  # gradients are heavy-tailed in health, and E5M2 is for that
        yield RoleFinding("watch", "outliers", FP8_SCALINGS, f"outliers: kurtosis {kurtosis:,.0f}")


def _by_history(history: History) -> Iterator[RoleFinding]:
    if history.saturates:
        words = f"the newest amax is {history.used:.3g} times what the scale holds"
        yield RoleFinding("recalibrate", "beyond the scale", ("delayed",), words)
    if history.infinite:
        yield RoleFinding("recalibrate", "infinite", ("delayed",), "an infinite amax, which freezes the scale")
    if history.growth is not None and history.growth > GROWTH.value:
        what = f"amax has grown {history.growth:.3g} times within {counted(history.rows, 'pass', 'passes')}"
        yield RoleFinding("watch", "growth", FP8_SCALINGS, what)
    if history.silent:
        yield RoleFinding("watch", "silent", ("delayed",), f"{counted(history.silent, 'expert')} recorded nothing")


def _verdict(
    scaling: Scaling, gemms: Collection[str], roles: Sequence[RoleHealth], states: Fp8States | None
) -> Verdict:
    of_gemms = [health for health in roles if health.module in gemms]
    kept = _modules_with("bf16", scaling, of_gemms)
    broken = _modules_with("repair", scaling, of_gemms)
    misfits = _misfits(scaling, of_gemms)  # of which nothing else has to be known
    concerned = [health for health in of_gemms if health.module not in misfits]
    again = _modules_with("recalibrate", scaling, concerned)
    margin = _modules_with("margin", scaling, concerned) - kept
    if scaling == "delayed" and not states:
        again |= {health.module for health in concerned}
    # A history alone shows whether delayed scaling saturates, so it suffices; underflow is only seen in elements
    unjudged = [
        health.role
        for health in concerned
        if health.role in IN_USE
        and not (bool(health.measured) or (scaling == "delayed" and health.history is not None))
    ]
    patterns = shortened(kept, list(gemms))
    unknown = dict(Counter(unjudged))
    return Verdict(scaling, len(gemms), len(broken), patterns, len(kept), len(again), len(margin), unknown)


def _modules_with(remedy: Remedy, scaling: Scaling, roles: Iterable[RoleHealth]) -> set[str]:
    return {
        health.module
        for health in roles
        if any(finding.remedy == remedy and scaling in finding.scalings for finding in health.findings)
    }


def _misfits(scaling: Scaling, roles: Iterable[RoleHealth]) -> set[str]:
    """The modules whose sizes no FP8 GEMM takes."""
    return {
        health.module
        for health in roles
        if any(finding.kind in _SIZES and scaling in finding.scalings for finding in health.findings)
    }
