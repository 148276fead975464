"""Checks before anything is loaded: whether a run fits into memory and its checkpoints on the disk, and which changes
would make it fit."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.output import directory_above
from precisionctl.conversion.ranks import number_in
from precisionctl.dtypes import DType
from precisionctl.errors import DiskProblem, EnvironmentProblem, RecipeError
from precisionctl.model.model_shape import ModelShape
from precisionctl.planning.make_plan import make_plan
from precisionctl.recipe import Optimizer, Recipe, Train
from precisionctl.sizes import size
from precisionctl.trainer.backends.choose import BackendName
from precisionctl.trainer.measure.flops import training_flops
from precisionctl.trainer.measure.memory import Memory
from precisionctl.trainer.parallel import shards
from precisionctl.trainer.parallel.world import World, check
from precisionctl.trainer.saved import run_folder
from precisionctl.trainer.saved.saving import with_optimizer

MOST_RANKS, MOST_TENSOR = 1024, 8
"""The most ranks that are suggested: in all, and for tensor parallelism, which should stay within one machine."""


Change = tuple[str, Recipe, int]
"""A change in words, the changed recipe, and the number of ranks."""

ChangesOf = Callable[[ModelShape, Recipe, int], Iterator[Iterator[Change]]]
"""What an engine can change of a recipe on so many ranks to take less memory: each kind from small to large."""


class MemoryOf(Protocol):
    """The memory that an engine takes on each of `ranks` ranks, as `estimate`."""

    def __call__(
        self, model: ModelShape, recipe: Recipe, backend: BackendName, *, ranks: int = 1, gpu: bool = False
    ) -> Memory: ...


@dataclass(frozen=True)
class Preflight:
    """What a run on `ranks` ranks will take: `memory` on each rank, of which `free` bytes are available; FLOPs and
    tokens of an update with full rows. `alternatives` say in words which changes would make
    it fit, if it does not."""

    ranks: int
    memory: Memory
    free: int
    flops: int
    tokens: int
    alternatives: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.free


def look_ahead(
    memory: MemoryOf, changes: ChangesOf, model: ModelShape, recipe: Recipe, backend: BackendName, ranks: int
) -> Preflight:
    """Estimate what a run of the recipe takes on this many ranks, on machines like this one."""

    def needed(recipe: Recipe, ranks: int) -> Memory:
        return memory(model, recipe, backend, ranks=ranks, gpu=torch.cuda.is_available())

    own, free = needed(recipe, ranks), free_memory()
    others = []
    for kind in changes(model, recipe, ranks) if own.total > free else ():
        for words, changed, count in kind:
            if (total := needed(changed, count).total) <= free:
                others.append(f"{words} ({size(total)})")
                break
    rows, length = recipe.train.batch_size, recipe.data.sequence_length
    flops = training_flops(model, [length] * rows)
    return Preflight(ranks, own, free, flops, rows * length, tuple(others))


def require_memory(ahead: Preflight, recipe: Recipe, world: World) -> tuple[str, ...]:
    """Raise EnvironmentProblem, naming what would fit, if a run does not fit into some rank's memory; with
    `train.memory_check = "warn"` return that as a note."""
    needed = ahead.memory.total
    short = int(world.all_reduce_max(torch.tensor(needed - ahead.free)))
    if short <= 0:
        return ()
    what = f"the run will need about {size(needed)} on each rank, and {size(needed - short)} are free"
    if recipe.train.memory_check == "warn":
        return (f"{what}. {would_fit(ahead)}",)
    do = f"{would_fit(ahead)} To try all the same: --set train.memory_check=warn."
    raise EnvironmentProblem(what, do=do)


def would_fit(ahead: Preflight) -> str:
    """The alternatives that fit, in a sentence."""
    if not ahead.alternatives:
        return "No change of the recipe fits."
    return f"What would fit: {'; or '.join(ahead.alternatives)}."


def free_memory() -> int:
    """Bytes that are free for a rank: on its GPU, or its share of this machine's memory within a container's limit."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    try:  # Linux's own estimate
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # a system that does not say it: all memory
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # The ranks on this machine: torchrun says how many; Slurm gives each machine so many, or one less
    tasks, nodes = number_in(os.environ, "SLURM_STEP_NUM_TASKS", 1), number_in(os.environ, "SLURM_STEP_NUM_NODES", 1)
    ranks_here = number_in(os.environ, "LOCAL_WORLD_SIZE", -(-tasks // max(1, nodes)))
    return min((available, *_container())) // max(1, ranks_here)


def _container(group: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Bytes that cgroups (version 2 and 1) leave free; caches count as free."""
    for limit, used, caches in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            most, now = int((group / limit).read_text()), int((group / used).read_text())
            stat = dict(line.split() for line in (group / caches).read_text().splitlines())
        except (OSError, ValueError):  # none, or `max`
            continue
        yield most - now + int(stat.get("inactive_file", 0))


def bundled_changes(model: ModelShape, recipe: Recipe, ranks: int) -> Iterator[Iterator[Change]]:
    """Changes with which the bundled trainer takes less memory, and can divide the model: each kind from small to
    large."""
    recomputed = replace(recipe, train=replace(recipe.train, recompute="layer"))
    may_recompute = recipe.train.recompute == "none"
    kinds: list[Iterator[Change]] = []
    if may_recompute:
        kinds.append(iter([("train.recompute=layer", recomputed, ranks)]))
    kinds.append(_smaller_passes("", recipe, ranks))
    if may_recompute:
        kinds.append(_smaller_passes(" with train.recompute=layer", recomputed, ranks))
    if recipe.optimizer.preset == "adamw":
        lm = replace(recipe, optimizer=replace(recipe.optimizer, preset="fp8-lm"))
        kinds.append(iter([("optimizer.preset=fp8-lm", lm, ranks)]))
    kinds.append(_more_ranks("", recipe, ranks))
    if may_recompute:
        kinds.append(_more_ranks(" with train.recompute=layer", recomputed, ranks))
    kinds.append(_tensor_parallel(recipe, ranks))
    for kind in kinds:
        yield (change for change in kind if _can_be_divided(model, *change[1:]))


def _can_be_divided(model: ModelShape, recipe: Recipe, ranks: int) -> bool:
    try:
        check(ranks, recipe)
        shards.check(model, recipe.parallel)
    except RecipeError:
        return False
    return True


def _smaller_passes(words: str, recipe: Recipe, ranks: int) -> Iterator[Change]:
    size = recipe.train.micro_batch_size
    while size > 1:
        size = next(each for each in range(size // 2, 0, -1) if recipe.train.batch_size % each == 0)
        smaller = replace(recipe, train=replace(recipe.train, micro_batch_size=size))
        yield f"train.micro_batch_size={size}{words}", smaller, ranks


def _more_ranks(words: str, recipe: Recipe, ranks: int) -> Iterator[Change]:
    while (ranks := 2 * ranks) <= MOST_RANKS:
        yield f"{ranks} ranks{words}", recipe, ranks


def _tensor_parallel(recipe: Recipe, ranks: int) -> Iterator[Change]:
    tensor = recipe.parallel.tensor
    while (tensor := 2 * tensor) <= MOST_TENSOR:
        shared = replace(recipe, parallel=replace(recipe.parallel, tensor=tensor, sequence=True))
        count = ranks
        while count <= max(MOST_RANKS, ranks):
            yield f"{count} ranks with parallel.tensor={tensor} and parallel.sequence=true", shared, count
            count *= 2


@dataclass(frozen=True)
class DiskSpace:
    """`each` is the bytes of a checkpoint with its optimizer, `free` the bytes free on the disk, and `more` the number
    of further checkpoints that will be there at a time: `train.keep`, plus the one being written, less those that exist
    already."""

    each: int
    free: int
    more: int

    @property
    def holds_all(self) -> bool:
        return self.more * self.each <= self.free


def checkpoint_bytes(source: Reader, optimizer: Optimizer) -> int:
    """The bytes of a checkpoint, with the `optimizer`, of a run that starts from `source`."""
    plan = make_plan(source, "megatron", dtype=DType.bfloat16)
    towers = plan.towers.nbytes if plan.model.wrapper else 0
    return with_optimizer(plan.text, optimizer).nbytes + towers


def disk_space(each: int, train: Train, out: Path) -> DiskSpace:
    """The disk space for a run in `out` (which may not exist yet) whose checkpoints take `each` bytes. A run that has
    reached its last step needs no more."""
    there = run_folder.steps_of(out)
    ended = max(there, default=0) >= train.steps
    more = 0 if ended else train.keep + 1 - min(len(there), train.keep)
    return DiskSpace(each, shutil.disk_usage(directory_above(out)).free, more)


def require_disk_space(each: int, train: Train, out: Path) -> DiskSpace:
    """As `disk_space`. Raises DiskProblem if not even one more checkpoint fits."""
    space = disk_space(each, train, out)
    if space.more and space.each > space.free:
        raise DiskProblem(
            f"a checkpoint of this run takes {size(space.each)}, and {size(space.free)} are free",
            where=out,
            do=f"Make room for {size(space.each - space.free)} more, and run the same command again, or choose another "
            "--out.",
        )
    return space
