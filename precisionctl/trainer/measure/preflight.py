"""Before anything is loaded: whether a run fits into memory, what would fit where it does not, and what it takes."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from precisionctl.errors import EnvironmentProblem, RecipeError
from precisionctl.model_shape import ModelShape
from precisionctl.recipe import Recipe
from precisionctl.trainer.backends.choose import BackendName
from precisionctl.trainer.measure.flops import training_flops
from precisionctl.trainer.measure.memory import Memory, Parameters, estimate
from precisionctl.trainer.parallel import shares
from precisionctl.trainer.parallel.world import World, check

MOST_RANKS, MOST_TENSOR = 1024, 8
"""Beyond which nobody is told to go: in all, and of those that share layers, which one machine has."""


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
    short = int(world.largest(torch.tensor(needed - ahead.free)))
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
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or "1")
    return min(_available(), *_container()) // here


def _available() -> int:
    """Bytes of memory that are available, as Linux estimates it; elsewhere all that there is."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


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


def _fitting(
    model: ModelShape, recipe: Recipe, backend: BackendName, ranks: int, free: int, gpu: bool
) -> Iterator[str]:
    """The least change of each kind that fits."""
    for changes in _changes(recipe, ranks):
        for words, changed, count in changes:
            try:
                check(count, changed)
                shares.check(model, changed.parallel)
            except RecipeError:
                continue
            needed = estimate(model, changed, backend, ranks=count, gpu=gpu).total
            if needed <= free:
                yield f"{words} ({_size(needed)})"
                break


Change = tuple[str, Recipe, int]


def _changes(recipe: Recipe, ranks: int) -> Iterator[Iterator[Change]]:
    """Changes that need less memory, by kind, each kind from small to large: in words, the recipe and the ranks."""
    again = replace(recipe, train=replace(recipe.train, recompute="layer"))
    if recipe.train.recompute == "none":
        yield iter([("train.recompute=layer", again, ranks)])
    yield _smaller_passes("", recipe, ranks)
    if recipe.train.recompute == "none":
        yield _smaller_passes(" with train.recompute=layer", again, ranks)
    if recipe.optimizer.preset == "adamw":
        lm = replace(recipe, optimizer=replace(recipe.optimizer, preset="fp8-lm"))
        yield iter([("optimizer.preset=fp8-lm", lm, ranks)])
    yield _more_ranks("", recipe, ranks)
    if recipe.train.recompute == "none":
        yield _more_ranks(" with train.recompute=layer", again, ranks)
    yield _shared_layers(recipe, ranks)


def _smaller_passes(words: str, recipe: Recipe, ranks: int) -> Iterator[Change]:
    size = recipe.train.micro_batch_size
    while size > 1:
        size = next(each for each in range(size // 2, 0, -1) if recipe.train.batch_size % each == 0)
        smaller = replace(recipe, train=replace(recipe.train, micro_batch_size=size))
        yield f"train.micro_batch_size={size}{words}", smaller, ranks


def _more_ranks(words: str, recipe: Recipe, ranks: int) -> Iterator[Change]:
    return ((f"{count} ranks{words}", recipe, count) for count in _more(ranks))


def _more(ranks: int) -> Iterator[int]:
    while (ranks := 2 * ranks) <= MOST_RANKS:
        yield ranks


def _shared_layers(recipe: Recipe, ranks: int) -> Iterator[Change]:
    tensor = recipe.parallel.tensor
    while (tensor := 2 * tensor) <= MOST_TENSOR:
        shared = replace(recipe, parallel=replace(recipe.parallel, tensor=tensor, sequence=True))
        for count in (ranks, *_more(ranks)):
            yield f"{count} ranks with parallel.tensor={tensor} and parallel.sequence=true", shared, count


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
