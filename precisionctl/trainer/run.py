"""A run in memory: its parts, how far it has come, and which rows it takes next."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from precisionctl.recipe import Recipe
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.data import Blend, Feed, Rows
from precisionctl.trainer.guard import Guard
from precisionctl.trainer.measure.meter import Meter
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.optimizer.adamw import RunOptimizer
from precisionctl.trainer.optimizer.learning_rate import rate_of_update
from precisionctl.trainer.optimizer.megatron_schedule import MegatronSchedule
from precisionctl.trainer.parallel.world import ALONE, World
from precisionctl.trainer.stopping import SkippedSteps


@dataclass
class Run:
    """A rank's part of a run. `step` is the number of updates made, and `position` the number of rows taken from the
    shuffled order. A `recorder` is there in an FP8 run while it computes in BF16, and in a BF16 run that collects
    amaxes."""

    recipe: Recipe
    model: GPT
    optimizer: RunOptimizer
    rows: Rows | Blend
    held_out: Rows | Blend | None = None
    step: int = 0
    position: int = 0
    recorder: Recorder | None = None
    world: World = ALONE
    guard: Guard | None = None
    schedule: MegatronSchedule | None = None
    """The checkpoint's learning rates, if the run continues those; None for the recipe's."""
    skipped: SkippedSteps = field(default_factory=SkippedSteps)
    feed: Feed = field(init=False)
    meter: Meter = field(init=False)

    def __post_init__(self) -> None:
        self.meter, self.feed = Meter(self.model), Feed(self.rows, self.recipe.train, self.device, self.world)

    def compute_in(self, *, fp8: bool) -> None:
        """Switch an FP8 run to FP8 or BF16 from the next update on. While it computes in BF16 a recorder keeps the FP8
        state up to date, and FP8 takes that over when it switches back."""
        linears = fp8_linears(self.model)
        if fp8 and self.recorder:
            states = self.recorder.states()
            for name, linear in linears.items():
                linear.set_fp8_state(states[name])
            self.recorder = None
        elif not fp8 and self.recorder is None:
            precision = self.recipe.precision
            self.recorder = Recorder(
                precision if precision.keeps_state else replace(precision, fp8=False), self.device, self.world
            )
            self.recorder.load({name: state for name, linear in linears.items() if (state := linear.fp8_state())})

    @property
    def in_fp8(self) -> bool:
        """Whether it computes in FP8 now."""
        return self.recipe.precision.fp8 and self.recorder is None

    def recording(self) -> AbstractContextManager[None]:
        """A context in which the recorder, if any, records the model's passes."""
        return self.model.recorded_by(self.recorder) if self.recorder else nullcontext()

    def learning_rate(self, step: int) -> float:
        """The learning rate of update number `step`, counted from 1."""
        return rate_of_update(step, self.recipe, self.schedule)

    def casts_once(self, passes: int) -> bool:
        """Whether an update of this many passes casts each weight to FP8 once instead of in every pass."""
        return passes > 1 and not self.world.shards_parameters and self.recipe.casts_once

    def capture_graphs(self) -> None:
        """Capture the layers as CUDA graphs, for batches of the next update's shape."""
        batches = self.feed.batches(self.position)
        rows, length = batches[0].tokens.shape
        self.model.capture(rows, length, same_weights=self.casts_once(len(batches)))

    @property
    def device(self) -> torch.device:
        return self.model.backend.device
