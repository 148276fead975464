"""A run in memory: what it is made of, how far it has come, and which rows it takes next."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import torch

from precisionctl.recipe import Recipe
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.data import Batch, Blend, Feed, Rows
from precisionctl.trainer.jump import Jump
from precisionctl.trainer.measure.meter import Meter
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.optimizer.adamw import RunOptimizer, learning_rate
from precisionctl.trainer.optimizer.megatron_schedule import MegatronSchedule
from precisionctl.trainer.parallel.world import ALONE, World
from precisionctl.trainer.shadow import Shadow
from precisionctl.trainer.skips import Skips


class Watch(Protocol):
    """What a run asks of its guard (`guard.Guard`)."""

    @property
    def stops(self) -> bool: ...
    @property
    def kept(self) -> Mapping[str, object]: ...
    def start(self, step: int) -> None: ...
    def begin(self, run: "Run") -> None: ...
    def before_passes(self, run: "Run", batches: Sequence[Batch], targets: int) -> None: ...
    def after_passes(self, run: "Run", loss: Callable[[], float]) -> None: ...
    def after_step(self, run: "Run", loss: float) -> Jump | None: ...
    def seen(self) -> Shadow | None: ...


@dataclass
class Run:
    """A rank's part of a run. `step` counts the updates made, and `position` the rows taken from the order. A BF16 run
    may have a recorder, to which its passes are shown; so has an FP8 run while it computes in BF16."""

    recipe: Recipe
    model: GPT
    optimizer: RunOptimizer
    rows: Rows | Blend
    held_out: Rows | Blend | None = None
    step: int = 0
    position: int = 0
    recorder: Recorder | None = None
    world: World = ALONE
    guard: Watch | None = None
    schedule: MegatronSchedule | None = None
    """The checkpoint's, where that goes on instead of the recipe's."""
    skips: Skips = field(default_factory=Skips)
    feed: Feed = field(init=False)
    meter: Meter = field(init=False)

    def __post_init__(self) -> None:
        self.meter, world = Meter(self.model), self.world
        self.feed = Feed(self.rows, self.recipe.train, self.device, rank=world.data_rank, ranks=world.data_count)

    def batches(self, position: int) -> tuple[list[Batch], int]:
        """This rank's micro-batches of the update that takes its rows from `position` on, and the targets of all
        ranks' in it."""
        batches = self.feed.batches(position)
        mine = torch.tensor(sum(batch.targets for batch in batches))
        return batches, int(self.world.sum_of_data(mine))

    def coming(self) -> Iterator[tuple[Batch, int]]:
        """This rank's micro-batches of the next update and all later ones, each with the targets of its update."""
        for position in count(self.position, self.recipe.train.batch_size):
            batches, targets = self.batches(position)
            yield from ((batch, targets) for batch in batches)

    def shown(self) -> AbstractContextManager[None]:
        """A context in which the model's passes are shown to the recorder, if there is one."""
        return self.model.recorded_by(self.recorder) if self.recorder else nullcontext()

    def rate(self, step: int) -> float:
        """The learning rate of an update; the first is 1."""
        train = self.recipe.train
        if self.schedule:
            return self.schedule.rate(step, train.batch_size)
        return learning_rate(step, train.steps, self.recipe.optimizer.lr, self.recipe.schedule)

    def casts_once(self, passes: int) -> bool:
        """Whether an update of so many passes casts each weight once."""
        return passes > 1 and not self.world.cuts and self.recipe.casts_once

    def capture(self) -> None:
        """Have layers launched as CUDA graphs from now on, for batches such as the next update's."""
        batches = self.feed.batches(self.position)
        rows, length = batches[0].tokens.shape
        self.model.capture(rows, length, same_weights=self.casts_once(len(batches)))

    @property
    def device(self) -> torch.device:
        return self.model.backend.device
