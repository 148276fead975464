"""Guard: which precision each update of an FP8 run computes in, and what is done where FP8 is too far from BF16.

Steps in BF16, of a schedule or after a decision, record what FP8 would: the state goes with the run through every
switch. All that a guard keeps in mind are the gaps of its last looks, until when it holds the run in BF16, and the
losses before the last switch, so that a run which is killed and gone on with decides the same.
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
from precisionctl.trainer.jump import Jump
from precisionctl.trainer.loop import held_out_loss, passes
from precisionctl.trainer.run import Run
from precisionctl.trainer.shadow import Decision, Shadow, liken


class Guard:
    """Watches a run whose modules can compute in FP8, and holds it in BF16 where FP8 does harm. `gaps` are those of the
    last looks, the newest last; up to and with step `bf16_until` the run is held in BF16. `recent` are the losses
    before it went over to FP8 after step `switched`, and later the last ones. A `jump` that took the run back holds it
    in BF16 for good."""

    def __init__(
        self,
        recipe: Recipe,
        gaps: Sequence[float] = (),
        bf16_until: int = 0,
        recent: Sequence[float] = (),
        switched: int = 0,
        *,
        jump: Jump | None = None,
    ) -> None:
        self.settings, self.gaps, self.bf16_until = recipe.guard, list(gaps), bf16_until
        self.recent, self.switched = list(recent), switched
        self._jump = jump if jump and self._is_jump(jump.size) else None
        self._phases = [(round(phase.until * recipe.train.steps), phase.fp8) for phase in recipe.precision.schedule]
        self._reference: tuple[float, Mapping[str, Tensor], tuple[float, float] | None] | None = None
        self._seen: Shadow | None = None

    @property
    def kept(self) -> dict[str, Any]:
        """What goes into a checkpoint."""
        kept: dict[str, Any] = {"gaps": self.gaps, "bf16_until": self.bf16_until}
        return kept | ({"recent": self.recent, "switched": self.switched} if self.settings.jump_at else {})

    @property
    def stops(self) -> bool:
        """Whether the run is to be saved and ended."""
        return self._acts and self.settings.act == "stop"

    @property
    def _acts(self) -> bool:
        return self._beyond >= self.settings.act_after

    @property
    def _beyond(self) -> int:
        """How many of the last looks, running, were beyond the limit."""
        count = 0
        for gap in reversed(self.gaps):
            if gap <= self.settings.act_at:  # NaN is beyond
                break
            count += 1
        return count

    def begin(self, run: Run) -> None:
        """Before an update: have the run in that update's precision. Raises PrecisionError where it is to stop."""
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
        if in_fp8 and not self._in_fp8(run.step):  # a run that goes on from just here has no recorder
            self.switched = run.step
        if in_fp8 == (run.recorder is None):
            return
        if run.recorder is None:
            leave_fp8(run)
        else:
            enter_fp8(run)

    def start(self, step: int) -> None:
        """A run begins after `step`."""
        self.switched = step

    def before_passes(self, run: Run, batches: Sequence[Batch], targets: int) -> None:
        """Before the passes of an update: if it is one to look at, those in BF16, which leave nothing behind. So it is
        where a run begins in FP8 and a jump is to be seen."""
        every = self.settings.shadow_every
        looks, begins = bool(every) and not (run.step + 1) % every, bool(self.settings.jump_at) and not self.recent
        if run.recorder or not (looks or begins):
            return
        held_out = held_out_loss(run.model, run.held_out, run.recipe.train.micro_batch_size) if run.held_out else None
        with run.model.recorded_by(Recorder(Precision(fp8=False), run.device, run.world)):
            loss = float(passes(run, batches, targets)) / targets
            gradients = run.optimizer.take_gradients()
            both = None
            if run.held_out and held_out is not None:
                both = held_out, held_out_loss(run.model, run.held_out, run.recipe.train.micro_batch_size)
        if begins:
            self.recent = [loss]
        if looks:
            self._reference = loss, gradients, both

    def after_passes(self, run: Run, loss: Callable[[], float]) -> None:
        """After the passes of an update: set them beside those in BF16, if there were any, and decide."""
        if self._reference is None:
            return
        loss_bf16, gradients, held_out = self._reference
        self._reference = None
        whole, modules = liken(run.optimizer.gradients, gradients, run.model.shares)
        seen = Shadow(run.step + 1, loss(), loss_bf16, whole, modules, held_out)
        self.gaps = [*self.gaps, seen.worst][-self.settings.act_after :]
        self._seen = seen.decided(self._decision(seen.worst), self._beyond)

    def after_step(self, run: Run, loss: float) -> Jump | None:
        """After an update: a jump that takes the run back to its last checkpoint, if its loss is one."""
        soon = run.recorder is None and run.step <= self.switched + self.settings.jump_within
        if not self.settings.jump_at or not (soon or math.isfinite(loss)):
            return None
        if not soon:
            self.recent = [*self.recent, loss][-self.settings.jump_within :]
            return None
        before = fmean(self.recent)
        jump = Jump(run.step, loss if math.isfinite(loss) else None, before, self.settings.jump_at, self.switched)
        return jump if self._is_jump(jump.size) else None

    def _is_jump(self, size: float) -> bool:
        return 0 < self.settings.jump_at < size

    def seen(self) -> Shadow | None:
        """The look that was taken at the update just made, once."""
        seen, self._seen = self._seen, None
        return seen

    def _decision(self, gap: float) -> Decision:
        if self._acts:
            return self.settings.act
        return "ok" if gap <= self.settings.warn_at else "warn"

    def _in_fp8(self, step: int) -> bool:
        if self._jump or step <= self.bf16_until:
            return False
        return next((fp8 for until, fp8 in self._phases if step <= until), True)


def leave_fp8(run: Run) -> None:
    """Compute in BF16 from now on, and let a recorder go on with the FP8 state."""
    run.recorder = Recorder(_recorded(run.recipe.precision), run.device, run.world)
    linears = fp8_linears(run.model).items()
    run.recorder.load({name: state for name, linear in linears if (state := linear.fp8_state())})


def enter_fp8(run: Run) -> None:
    """Compute in FP8 from now on, from what the steps in BF16 have recorded."""
    assert run.recorder is not None, "a run in BF16 records"
    states = run.recorder.states()
    for name, linear in fp8_linears(run.model).items():
        linear.set_fp8_state(states[name])
    run.recorder = None


def _recorded(precision: Precision) -> Precision:
    """Only delayed scaling keeps anything to record."""
    return precision if precision.keeps_state else replace(precision, fp8=False)


def _percents(shares: Sequence[float]) -> str:
    return ", ".join("no number" if math.isnan(share) else f"{share:.2%}" for share in shares)
