"""Guard: decides for each update of an FP8 run whether it computes in FP8 or BF16, and acts where FP8 is too far off.
All of it holds of NVFP4, too.

It only decides: the loop (`loop.py`) asks it around each update, and the Run makes the passes and switches precision.
Decisions depend on the gaps of the last shadow passes, on the step until which the run is held in BF16, and on the
losses before the last switch. All of that is saved, so a run that is killed and continued decides the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from torch import Tensor

from precisionctl.errors import PrecisionError
from precisionctl.recipe import Recipe
from precisionctl.trainer.parallel.shards import ModelShards
from precisionctl.trainer.rollback import Rollback
from precisionctl.trainer.shadow import Bf16Passes, Decision, Shadow, compare_gradients


class Guard:
    """Decides where a run whose modules can compute in FP8 computes in BF16, because FP8 does harm.

    `gaps` are the gaps of the last shadow passes, the newest last. The run is held in BF16 up to and including step
    `bf16_until`. `recent` are the last losses before the run switched to FP8 (after step `switched`); once the loss is
    no longer watched for a jump, they are the last losses. `in_fp8` says whether the last update computed in FP8, as
    none has before the first. After a `rollback` whose jump exceeds the present bound, the run stays in BF16.
    """

    def __init__(
        self,
        recipe: Recipe,
        gaps: Sequence[float] = (),
        bf16_until: int = 0,
        recent: Sequence[float] = (),
        switched: int = 0,
        *,
        in_fp8: bool = False,
        rollback: Rollback | None = None,
    ) -> None:
        self.settings, self.gaps, self.bf16_until = recipe.guard, list(gaps), bf16_until
        self.recent, self.switched, self._in_fp8 = list(recent), switched, in_fp8
        self._stays_in_bf16 = rollback is not None and self._is_beyond_bound(rollback)
        self._phases = [(round(phase.until * recipe.train.steps), phase.fp8) for phase in recipe.precision.schedule]
        self._shadow: Shadow | None = None

    @property
    def saved_state(self) -> dict[str, Any]:
        """The state to save in a checkpoint, as keyword arguments of this class."""
        state: dict[str, Any] = {"gaps": self.gaps, "bf16_until": self.bf16_until}
        return state | ({"recent": self.recent, "switched": self.switched} if self.settings.jump_at else {})

    @property
    def stops(self) -> bool:
        """Whether the run must be saved and ended now."""
        return self._acts and self.settings.act == "stop"

    @property
    def _acts(self) -> bool:
        return self._beyond >= self.settings.act_after

    @property
    def _beyond(self) -> int:
        """How many of the last shadow passes, in a row, were beyond the limit."""
        count = 0
        for gap in reversed(self.gaps):
            if gap <= self.settings.act_at:  # NaN is beyond
                break
            count += 1
        return count

    def before_step(self, step: int) -> bool:
        """Decide whether the update after `step` computes in FP8. Raises PrecisionError if the run must stop."""
        if self.stops:
            raise PrecisionError(
                f"the guard stopped the run after step {step}: its loss was {_percents(self.gaps)} from BF16's, "
                f"where {_percents([self.settings.act_at])} is the limit",
                do="Its last step is saved, and shadow.jsonl says which modules' gradients differ. Keep those in BF16 "
                "(precision.keep_bf16) or continue from there in BF16 with another --out; or continue with the same "
                "command and --set guard.act=bf16, or another guard.act_at.",
            )
        if self._acts:
            self.gaps, self.bf16_until = [], step + self.settings.bf16_steps
        scheduled = next((fp8 for until, fp8 in self._phases if step < until), True)
        held = self._stays_in_bf16 or step < self.bf16_until
        before, self._in_fp8 = self._in_fp8, scheduled and not held
        if self._in_fp8 and not before:
            self.switched = step
        return self._in_fp8

    def wants_bf16_passes(self, step: int) -> bool:
        """Whether the update number `step`, which computes in FP8, is also to be computed in BF16: to compare the two,
        or because the run begins in FP8 and needs a first loss to compare later ones with."""
        return self._compares(step) or self._lacks_first_loss

    def compare(
        self, step: int, bf16: Bf16Passes, loss: float, gradients: Mapping[str, Tensor], shards: ModelShards
    ) -> None:
        """Compare loss and gradients of update `step` in FP8 with those in BF16, and decide."""
        if self._lacks_first_loss and math.isfinite(bf16.loss):
            self.recent = [bf16.loss]
        if not self._compares(step):
            return
        whole, modules = compare_gradients(gradients, bf16.gradients, shards)
        shadow = Shadow(step, loss, bf16.loss, whole, modules, bf16.held_out)
        self.gaps = [*self.gaps, shadow.worst][-self.settings.act_after :]
        decision: Decision = "ok" if shadow.worst <= self.settings.warn_at else "warn"
        if self._acts:
            decision = self.settings.act
        self._shadow = replace(shadow, decision=decision, beyond=self._beyond)

    def after_step(self, step: int, loss: float) -> Rollback | None:
        """Return the rollback to the last checkpoint if the loss of update `step` has jumped since the switch to FP8,
        else None."""
        within = self.settings.jump_within
        just_switched = self._in_fp8 and step <= self.switched + within
        if not self.settings.jump_at or not (just_switched or math.isfinite(loss)):
            return None
        if not just_switched:
            self.recent = [*self.recent, loss][-within:]
            return None
        if not self.recent:  # BF16 has given no number yet either
            return None
        before, bound = fmean(self.recent), self.settings.jump_at
        rollback = Rollback(step, loss if math.isfinite(loss) else None, before, bound, self.switched)
        return rollback if self._is_beyond_bound(rollback) else None

    def take_shadow(self) -> Shadow | None:
        """The comparison made at the last update, or None; it is returned only once."""
        shadow, self._shadow = self._shadow, None
        return shadow

    def _compares(self, step: int) -> bool:
        every = self.settings.shadow_every
        return bool(every) and not step % every

    @property
    def _lacks_first_loss(self) -> bool:
        return bool(self.settings.jump_at) and not self.recent

    def _is_beyond_bound(self, rollback: Rollback) -> bool:
        return 0 < self.settings.jump_at < rollback.jump


def _percents(shares: Sequence[float]) -> str:
    return ", ".join("no number" if math.isnan(share) else f"{share:.2%}" for share in shares)
