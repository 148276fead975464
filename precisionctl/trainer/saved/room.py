"""What a run's checkpoints take on the disk of its folder, and whether they have room there."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.output import directory_above
from precisionctl.errors import DiskProblem
from precisionctl.planning.make_plan import make_plan
from precisionctl.recipe import Train
from precisionctl.trainer.saved import run_folder
from precisionctl.trainer.saved.saving import with_optimizer


@dataclass(frozen=True)
class Room:
    """Bytes that one checkpoint takes, `each` with its optimizer; bytes that are `free`; and how many `more` of them
    there will be at a time: `train.keep` and the one that is being written, less those that are there."""

    each: int
    free: int
    more: int

    @property
    def holds_all(self) -> bool:
        return self.more * self.each <= self.free


def checkpoint_bytes(source: Reader) -> int:
    """What a checkpoint of a run from `source` takes, its optimizer with it."""
    plan = with_optimizer(make_plan(source, "megatron", dtype=torch.bfloat16))
    return sum(spec.nbytes for spec in plan.targets.values())


def room_of(each: int, train: Train, out: Path) -> Room:
    """The room in `out`, which need not be there, for a run whose checkpoints take `each` bytes. One that has ended
    writes no more."""
    there = run_folder.steps_of(out)
    ended = max(there, default=0) >= train.steps
    more = 0 if ended else train.keep + 1 - min(len(there), train.keep)
    return Room(each, shutil.disk_usage(directory_above(out)).free, more)


def require_room(each: int, train: Train, out: Path) -> Room:
    """The room that `room_of` finds. Raises DiskProblem where not even the next checkpoint fits."""
    room = room_of(each, train, out)
    if room.more and room.each > room.free:
        raise DiskProblem(
            f"a checkpoint of this run takes {room.each:,} bytes, and {room.free:,} are free",
            where=out,
            do="Make room and run the same command again, or choose another --out.",
        )
    return room
