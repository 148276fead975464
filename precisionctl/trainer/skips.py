"""Updates that are not made, because their loss or their gradients are no number: counted, and bounded."""

from dataclasses import dataclass

from precisionctl.errors import PrecisionError
from precisionctl.fp8.state import Fp8State
from precisionctl.trainer.backend import fp8_linears
from precisionctl.trainer.model import GPT
from precisionctl.trainer.recorder import Recorder


@dataclass
class Skips:
    """How many there were, in all and `running`: since the last update that was made."""

    total: int = 0
    running: int = 0

    def add(self, step: int, loss: float, norm: float, most: int) -> None:
        """One more, at a step. Raises PrecisionError beyond `most` running."""
        self.total += 1
        self.running += 1
        if self.running > most:
            running = f", the last of {self.running} running that were skipped" if most else ""
            raise PrecisionError(
                f"step {step} has loss {loss} and gradient norm {norm}{running}",
                do="Nothing of these steps was taken up. Lower optimizer.lr, or look at the newest checkpoint with "
                "`precisionctl inspect --fp8`; running again starts from it. train.max_skipped bounds how many there "
                "may be.",
            )


def forget_infinite(model: GPT, recorder: Recorder | None) -> None:
    """Let no pass of a skipped update hold the scales: an infinite amax would, as long as it is in a history."""
    for linear in fp8_linears(model).values():
        if (state := linear.fp8_state()) and not _is_finite(state):
            linear.set_fp8_state(_without_infinite(state))
    if recorder:
        recorder.load(
            {name: _without_infinite(state) for name, state in recorder.states().items() if not _is_finite(state)}
        )


def _is_finite(state: Fp8State) -> bool:
    return all(bool(part.amax_history.isfinite().all()) for part in state.roles.values())


def _without_infinite(state: Fp8State) -> Fp8State:
    return Fp8State({role: part.without_infinite() for role, part in state.roles.items()})
