"""What a run's guard has taken back: `rollback.json` in the folder of the run."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from precisionctl.checkpoints.output import replace_file
from precisionctl.errors import damage
from precisionctl.trainer.measure.metrics import relative_gap

ROLLBACK_FILE = "rollback.json"


@dataclass(frozen=True)
class Rollback:
    """At `step` the loss (None: not finite) was above `before` by more than the share `bound`, so the run went back to
    step `back_to`. `before` is the mean loss before the switch to FP8, which was after step `switched`.

    It is kept in the run's folder and holds the run in BF16 from then on. Steps after `back_to` are removed from
    `metrics.jsonl`, as they are made again.
    """

    step: int
    loss: float | None
    before: float
    bound: float
    switched: int
    back_to: int = 0

    @property
    def jump(self) -> float:
        """(loss - before) / before."""
        return math.inf if self.loss is None else relative_gap(self.loss, self.before)

    @property
    def words(self) -> str:
        """It in a sentence for the user."""
        loss = "is not a number" if self.loss is None else f"{self.loss:.4f} is {self.jump:.1%} above {self.before:.4f}"
        return (
            f"guard: at step {self.step} the loss {loss}, the bound after the switch from BF16 at step "
            f"{self.switched} is {self.bound:.1%}: back to step {self.back_to}, and on in BF16"
        )


def write_rollback(folder: Path, rollback: Rollback) -> None:
    """Write `rollback.json` atomically."""
    replace_file(folder / ROLLBACK_FILE, json.dumps(asdict(rollback), indent=1))


def read_rollback(folder: Path) -> Rollback | None:
    """The rollback of a run; None if there was none. Raises DamagedCheckpoint for a file that makes no sense."""
    file = folder / ROLLBACK_FILE
    if not file.is_file():
        return None
    with damage("not what a guard writes", file, "Remove it: the run then does not stay in BF16."):
        found = Rollback(**json.loads(file.read_bytes()))
        numbers = [found.before, found.bound, found.jump, found.step, found.switched, found.back_to]
        if not all(isinstance(number, int | float) for number in numbers):
            raise ValueError("a value of the wrong type")
    return found
