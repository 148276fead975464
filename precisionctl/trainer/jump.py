"""A jump of the loss right after a run went over to FP8, which takes it back to its last checkpoint, and on in BF16.

It is written down in the run's folder, with its numbers: that is what holds the run in BF16 from then on, whatever
happens to it. Its steps are no longer in `metrics.jsonl`, as they are made again.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from precisionctl.checkpoints.output import replace_file
from precisionctl.errors import damage

FILE = "rollback.json"


@dataclass(frozen=True)
class Jump:
    """At `step` the loss (None: no number) was beyond `before`, the mean before the switch after step `switched`, by
    more than `bound`; the run went back to step `back_to`."""

    step: int
    loss: float | None
    before: float
    bound: float
    switched: int
    back_to: int = 0

    @property
    def size(self) -> float:
        """(loss - before) / before."""
        return math.inf if self.loss is None else self.loss / self.before - 1

    @property
    def words(self) -> str:
        loss = "is not a number" if self.loss is None else f"{self.loss:.4f} is {self.size:.1%} above {self.before:.4f}"
        return (
            f"guard: at step {self.step} the loss {loss}, the bound after the switch to FP8 at step "
            f"{self.switched} is {self.bound:.1%}: back to step {self.back_to}, and on in BF16"
        )


def write_jump(folder: Path, jump: Jump) -> None:
    """At once: readers see none of it or all."""
    replace_file(folder / FILE, json.dumps(asdict(jump), indent=1))


def read_jump(folder: Path) -> Jump | None:
    """None where there was none. Raises DamagedCheckpoint."""
    file = folder / FILE
    if not file.is_file():
        return None
    with damage("not what a guard writes", file, "Remove it: the run then goes on in FP8."):
        jump = Jump(**json.loads(file.read_bytes()))
        numbers = [jump.before, jump.bound, jump.size, jump.step, jump.switched, jump.back_to]
        if not all(isinstance(number, int | float) for number in numbers):
            raise ValueError("a value of the wrong type")
    return jump
