"""Updates that are not made, because their loss or their gradients are no number: counted, and bounded."""

import math
from dataclasses import dataclass

from precisionctl.errors import PrecisionError


@dataclass
class Skips:
    """How many there were, in all and `running`: since the last update that was made."""

    total: int = 0
    running: int = 0

    def count(self, step: int, loss: float, norm: float, most: int) -> None:
        """Take note of a step. Raises PrecisionError beyond `most` running that were skipped."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.running = 0
            return
        self.total += 1
        self.running += 1
        if self.running > most:
            running = f", the last of {self.running} running that were skipped" if most else ""
            raise PrecisionError(
                f"step {step} has loss {loss} and gradient norm {norm}{running}",
                do="These steps changed nothing. Lower optimizer.lr, or look at the newest checkpoint with "
                "`precisionctl inspect --fp8`; running again starts from it. train.max_skipped bounds how many there "
                "may be.",
            )
