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


def room_of(source: Reader, train: Train, out: Path) -> Room:
    """Of a run from `source` in the folder `out`, which need not be there. One that has ended writes no more."""
    there = run_folder.steps_of(out)
    specs = with_optimizer(make_plan(source, "megatron", dtype=torch.bfloat16)).targets.values()
    ended = max(there, default=0) >= train.steps
    more = 0 if ended else train.keep + 1 - min(len(there), train.keep)
    return Room(sum(spec.nbytes for spec in specs), shutil.disk_usage(directory_above(out)).free, more)


def require_room(source: Reader, train: Train, out: Path) -> Room:
    """Raise DiskProblem where not even the next checkpoint fits."""
    room = room_of(source, train, out)
    if room.more and room.each > room.free:
        raise DiskProblem(
            f"a checkpoint of this run takes {room.each:,} bytes, and {room.free:,} are free",
            where=out,
            do="Make room and run the same command again, or choose another --out.",
        )
    return room
