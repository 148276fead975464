"""Before anything is loaded: what a run takes, whether that fits into memory and its checkpoints on the disk, and what
would fit where it does not."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.output import directory_above
from precisionctl.errors import DiskProblem, EnvironmentProblem, RecipeError
from precisionctl.model_shape import ModelShape
from precisionctl.planning.make_plan import make_plan
from precisionctl.recipe import Recipe, Train
from precisionctl.trainer.backends.choose import BackendName
from precisionctl.trainer.measure.flops import training_flops
from precisionctl.trainer.measure.memory import Memory, Parameters, estimate
from precisionctl.trainer.parallel import shards
from precisionctl.trainer.parallel.world import World, check
from precisionctl.trainer.saved import run_folder
from precisionctl.trainer.saved.saving import with_optimizer

MOST_RANKS, MOST_TENSOR = 1024, 8
"""The most ranks that are suggested: in all, and of tensor-parallel ones, which are of one machine."""


@dataclass(frozen=True)
class Preflight:
    """What a run of `ranks` will take: `memory` of each rank, of which so many bytes are `free`; FLOPs and tokens of an
    update whose rows are full, and the model's parameters. `alternatives` say what would fit, where it does not."""

    ranks: int
    memory: Memory
    free: int
    flops: int
    tokens: int
    parameters: int
    alternatives: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.free


def look_ahead(model: ModelShape, recipe: Recipe, backend: BackendName, ranks: int) -> Preflight:
    """Estimate what a run takes on this machine, or on as many of its kind as the ranks need."""
    gpu = torch.cuda.is_available()
    memory, free = estimate(model, recipe, backend, ranks=ranks, gpu=gpu), free_memory()
    rows, length = recipe.train.batch_size, recipe.data.sequence_length
    others = tuple(_fitting(model, recipe, backend, ranks, free, gpu)) if memory.total > free else ()
    flops = training_flops(model, [length] * rows)
    return Preflight(ranks, memory, free, flops, rows * length, Parameters.of(model).all, others)


def require_memory(model: ModelShape, recipe: Recipe, backend: BackendName, world: World) -> tuple[str, ...]:
    """Raise EnvironmentProblem, naming what would fit, where a run does not on some rank; under
    `train.memory_check = "warn"` that is a note."""
    ahead = look_ahead(model, recipe, backend, world.count)
    needed = ahead.memory.total
    short = int(world.all_reduce_max(torch.tensor(needed - ahead.free)))
    if short <= 0:
        return ()
    what = f"the run will need about {_size(needed)} on each rank, and {_size(needed - short)} are free"
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
    """Bytes that a rank may take: of its GPU, or its share of this machine's, within the limit of a container."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    try:  # as Linux estimates it
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except OSError:  # elsewhere all that there is
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or "1")
    return min(available, *_container()) // ranks_here


def _container(group: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """What cgroups leave, version 2 and 1, less the caches that they count."""
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


Change = tuple[str, Recipe, int]
"""In words, the recipe and the ranks."""


def _fitting(
    model: ModelShape, recipe: Recipe, backend: BackendName, ranks: int, free: int, gpu: bool
) -> Iterator[str]:
    """The least change of each kind that fits."""
    recomputed = replace(recipe, train=replace(recipe.train, recompute="layer"))
    may_recompute = recipe.train.recompute == "none"
    kinds: list[Iterator[Change]] = []  # of changes that need less memory, each from small to large
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
    for changes in kinds:
        for words, changed, count in changes:
            try:
                check(count, changed)
                shards.check(model, changed.parallel)
            except RecipeError:
                continue
            needed = estimate(model, changed, backend, ranks=count, gpu=gpu).total
            if needed <= free:
                yield f"{words} ({_size(needed)})"
                break


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


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


@dataclass(frozen=True)
class DiskSpace:
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


def disk_space(each: int, train: Train, out: Path) -> DiskSpace:
    """The space in `out`, which need not be there, for a run whose checkpoints take `each` bytes. One that has ended
    writes no more."""
    there = run_folder.steps_of(out)
    ended = max(there, default=0) >= train.steps
    more = 0 if ended else train.keep + 1 - min(len(there), train.keep)
    return DiskSpace(each, shutil.disk_usage(directory_above(out)).free, more)


def require_disk_space(each: int, train: Train, out: Path) -> DiskSpace:
    """As `disk_space`. Raises DiskProblem where not even the next checkpoint fits."""
    space = disk_space(each, train, out)
    if space.more and space.each > space.free:
        raise DiskProblem(
            f"a checkpoint of this run takes {space.each:,} bytes, and {space.free:,} are free",
            where=out,
            do="Make room and run the same command again, or choose another --out.",
        )
    return space
