"""Guard: decides for each update of an FP8 run whether it computes in FP8 or BF16, and acts where FP8 is too far off.

While a run computes in BF16, by schedule or by decision, a Recorder keeps the FP8 state up to date, so that it can
switch back. Decisions depend on the gaps of the last shadow passes, on the step until which the run is held in BF16,
and on the losses before the last switch. All of that is saved, so a run that is killed and continued decides the same.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from torch import Tensor

from precisionctl.errors import PrecisionError
from precisionctl.precision import Precision
from precisionctl.recipe import Recipe
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.data import Batch
from precisionctl.trainer.passes import accumulate_gradients, held_out_loss
from precisionctl.trainer.run import Run
from precisionctl.trainer.saved.run_folder import Rollback
from precisionctl.trainer.shadow import Decision, Shadow, compare_gradients


class Guard:
    """Watches a run whose modules can compute in FP8, and switches it to BF16 where FP8 does harm.

    `gaps` are the gaps of the last shadow passes, the newest last. The run is held in BF16 up to and including step
    `bf16_until`. `recent` are the last losses before the run switched to FP8 (after step `switched`); once the loss is
    no longer watched for a jump, they are the last losses. After a `rollback` whose jump exceeds the present bound, the
    run stays in BF16.
    """

    def __init__(
        self,
        recipe: Recipe,
        gaps: Sequence[float] = (),
        bf16_until: int = 0,
        recent: Sequence[float] = (),
        switched: int = 0,
        *,
        rollback: Rollback | None = None,
    ) -> None:
        self.settings, self.gaps, self.bf16_until = recipe.guard, list(gaps), bf16_until
        self.recent, self.switched = list(recent), switched
        self._stays_in_bf16 = rollback is not None and self._is_beyond_bound(rollback)
        self._phases = [(round(phase.until * recipe.train.steps), phase.fp8) for phase in recipe.precision.schedule]
        self._reference: tuple[float, Mapping[str, Tensor], tuple[float, float] | None] | None = None
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

    def start(self, step: int) -> None:
        """Tell the guard that a new run begins after `step`."""
        self.switched = step

    def before_step(self, run: Run) -> None:
        """Switch the run to the precision of its next update. Raises PrecisionError if the run must stop."""
        if self.stops:
            raise PrecisionError(
                f"the guard stopped the run after step {run.step}: FP8's loss was {_percents(self.gaps)} from BF16's, "
                f"where {_percents([self.settings.act_at])} is the limit",
                do="Its last step is saved, and shadow.jsonl says which modules' gradients differ. Keep those in BF16 "
                "(precision.keep_bf16) or continue from there in BF16 with another --out; or continue with the same "
                "command and --set guard.act=bf16, or another guard.act_at.",
            )
        if self._acts:
            self.gaps, self.bf16_until = [], run.step + self.settings.bf16_steps
        in_fp8 = self._in_fp8(run.step + 1)
        if in_fp8 and not self._in_fp8(run.step):  # asked of the steps, as a run continued here has no recorder
            self.switched = run.step
        linears = fp8_linears(run.model)
        if in_fp8 and run.recorder:  # to FP8: take over the state recorded in BF16
            states = run.recorder.states()
            for name, linear in linears.items():
                linear.set_fp8_state(states[name])
            run.recorder = None
        elif not in_fp8 and run.recorder is None:  # to BF16: a recorder continues the FP8 state
            precision = run.recipe.precision
            run.recorder = Recorder(
                precision if precision.keeps_state else replace(precision, fp8=False), run.device, run.world
            )
            run.recorder.load({name: state for name, linear in linears.items() if (state := linear.fp8_state())})

    def before_gradients(self, run: Run, batches: Sequence[Batch], targets: int) -> None:
        """Before the passes of an update: if this update is to be compared with BF16, make its passes in BF16 first,
        without changing anything. A run that begins in FP8 also does, for a first loss to compare later ones with."""
        every = self.settings.shadow_every
        compares = bool(every) and not (run.step + 1) % every
        begins = bool(self.settings.jump_at) and not self.recent
        if run.recorder or not (compares or begins):
            return
        micro_batch_size = run.recipe.train.micro_batch_size
        held_out = held_out_loss(run.model, run.held_out, micro_batch_size) if run.held_out else None
        with run.model.recorded_by(Recorder(Precision(fp8=False), run.device, run.world)):
            loss = float(accumulate_gradients(run, batches, targets)[0]) / targets
            gradients = run.optimizer.take_gradients()
            both = None
            if run.held_out and held_out is not None:
                both = held_out, held_out_loss(run.model, run.held_out, micro_batch_size)
        if begins:
            self.recent = [loss]
        if compares:
            self._reference = loss, gradients, both

    def after_gradients(self, run: Run, loss: Callable[[], float]) -> None:
        """After the passes of an update: compare loss and gradients with those in BF16, if there were any, and decide.
        `loss` gives the update's loss; it is called only if needed, as it waits for the GPU."""
        if self._reference is None:
            return
        loss_bf16, gradients, held_out = self._reference
        self._reference = None
        whole, modules = compare_gradients(run.optimizer.gradients, gradients, run.model.shards)
        shadow = Shadow(run.step + 1, loss(), loss_bf16, whole, modules, held_out)
        self.gaps = [*self.gaps, shadow.worst][-self.settings.act_after :]
        decision: Decision = "ok" if shadow.worst <= self.settings.warn_at else "warn"
        if self._acts:
            decision = self.settings.act
        self._shadow = replace(shadow, decision=decision, beyond=self._beyond)

    def after_step(self, run: Run, loss: float) -> Rollback | None:
        """After an update: the rollback to the last checkpoint if the loss has jumped since the switch to FP8, else
        None."""
        within = self.settings.jump_within
        just_switched = run.recorder is None and run.step <= self.switched + within
        if not self.settings.jump_at or not (just_switched or math.isfinite(loss)):
            return None
        if not just_switched:
            self.recent = [*self.recent, loss][-within:]
            return None
        before, bound = fmean(self.recent), self.settings.jump_at
        rollback = Rollback(run.step, loss if math.isfinite(loss) else None, before, bound, self.switched)
        return rollback if self._is_beyond_bound(rollback) else None

    def take_shadow(self) -> Shadow | None:
        """The comparison made at the last update, or None; it is returned only once."""
        shadow, self._shadow = self._shadow, None
        return shadow

    def _is_beyond_bound(self, rollback: Rollback) -> bool:
        return 0 < self.settings.jump_at < rollback.jump

    def _in_fp8(self, step: int) -> bool:
        if self._stays_in_bf16 or step <= self.bf16_until:
            return False
        return next((fp8 for until, fp8 in self._phases if step <= until), True)


def _percents(shares: Sequence[float]) -> str:
    return ", ".join("no number" if math.isnan(share) else f"{share:.2%}" for share in shares)
