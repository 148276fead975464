"""Plan: every job of a conversion and every tensor of its result, checked before any tensor is read.

Names are logical: one per layer, with no rank, stage or stacking. Each source tensor is consumed by
exactly one job and each target tensor is produced by exactly one. A job is one Megatron row (the fused
group), also from Hugging Face to Hugging Face, because q/k/v and gate/up share an FP8 scale.
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Protocol

import torch

from precisionctl.architectures.find import architecture_of
from precisionctl.architectures.param_map import Architecture, Row, layers
from precisionctl.cast import Encode
from precisionctl.errors import MissingTensor, PrecisionError, ShapeMismatch, UnmappedTensor
from precisionctl.lower import layout_parts
from precisionctl.model_shape import MAKE_VOCAB_SIZE_DIVISIBLE_BY, ModelShape
from precisionctl.param import GEMM_ALIGNMENT, ONE_RANK, REPLICATED, Layout, Parallelism, TensorSpec


@dataclass(frozen=True)
class Job:
    """One row at one layer. `name` is the Megatron parameter, `module` its module.

    `reads` is empty where the target's biases are filled with zeros, `writes` where the source's must be
    zero to be left out. `copies` are stored copies (a tied `lm_head`) that must equal `reads[0]`.
    """

    name: str
    row: Row
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    copies: tuple[str, ...] = ()
    encode: Encode | None = None

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Plan:
    """What `convert.run` does. `targets` are all tensors of the result, in the order they are written."""

    model: ModelShape
    source: Layout
    target: Layout
    jobs: tuple[Job, ...]
    targets: Mapping[str, TensorSpec]
    derived: tuple[str, ...] = ()
    parallelism: Parallelism = ONE_RANK
    quantization: Mapping[str, object] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.targets.values())

    @property
    def gemms(self) -> tuple[str, ...]:
        """Modules whose GEMM an FP8 recipe computes in FP8."""
        return tuple(job.module for job in self.jobs if job.row.gemm)

    def describe(self) -> dict[str, object]:
        """The plan as JSON: what `--dry-run --json` prints, and what `digest` covers."""
        return {
            "model": dataclasses.asdict(self.model),
            "source": self.source,
            "target": self.target,
            "parallelism": dataclasses.asdict(self.parallelism),
            "jobs": [
                {"name": job.name, "reads": job.reads, "writes": job.writes, "copies": job.copies}
                | ({"encode": job.encode.describe()} if job.encode else {})
                for job in self.jobs
            ],
            "targets": {
                name: {"shape": spec.shape, "dtype": str(spec.dtype).removeprefix("torch.")}
                for name, spec in self.targets.items()
            },
            "derived": self.derived,
            "quantization": self.quantization,
        }

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()


class Source(Protocol):
    """The part of a Reader that planning needs."""

    @property
    def layout(self) -> Layout: ...
    @property
    def model(self) -> ModelShape: ...
    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...


def make_plan(
    source: Source,
    target: Layout,
    *,
    dtype: torch.dtype | None = None,
    parallelism: Parallelism = ONE_RANK,
) -> Plan:
    """Plan the way from `source` to a checkpoint of layout `target`.

    `dtype` is that of every target tensor; None keeps each as stored, FP8 codes decoded to BF16.
    Raises UnknownArchitecture, UnmappedTensor, MissingTensor, ShapeMismatch or PrecisionError.
    """
    architecture = architecture_of(source.model.architecture)
    model = _padded(source, target, parallelism.tensor)
    if model.num_layers > len(source.specs):  # before a loop over as many layers as a config may claim
        raise MissingTensor(
            f"{model.num_layers} layers, but only {len(source.specs)} tensors", do="Is a shard missing?"
        )
    jobs = tuple(_jobs(architecture, model, source.layout, target, source.specs))
    derived = _derived(architecture, model, source)
    _check_consumed(jobs, derived, source)
    targets: dict[str, TensorSpec] = {}
    for job in jobs:
        targets |= _targets(job, model, target, source.specs, dtype)
        _check_dtypes(job, source)
        _check_shapes(job, model, source)
        _check_division(job, model, parallelism.tensor)
    return Plan(model, source.layout, target, jobs, targets, derived, parallelism)


def _padded(source: Source, target: Layout, tensor_parallel: int) -> ModelShape:
    """Megatron pads the vocabulary; a Megatron source keeps its padding, for a Megatron target too."""
    if source.layout == "megatron" or target == "hf":
        return source.model
    return source.model.padded(MAKE_VOCAB_SIZE_DIVISIBLE_BY * tensor_parallel)


def _jobs(
    architecture: Architecture, model: ModelShape, source: Layout, target: Layout, specs: Mapping[str, TensorSpec]
) -> Iterator[Job]:
    copies = {alias.of: alias.hf for alias in architecture.aliases if getattr(model, alias.switch)}
    for row in architecture.rows:
        here, there = row.present.in_layout(source, model), row.present.in_layout(target, model)
        if not here and not there:
            continue
        for layer in layers(row.megatron, model):
            reads = names(row, source, layer) if here else ()
            stored = tuple(copies[name] for name in reads if name in copies and copies[name] in specs)
            writes = names(row, target, layer) if there else ()
            yield Job(names(row, "megatron", layer)[0], row, reads, writes, stored)


def names(row: Row, layout: Layout, layer: int | None) -> tuple[str, ...]:
    """A row's tensors at one layer."""
    templates = row.hf if layout == "hf" else (row.megatron,)
    return tuple(name.replace("{layer}", str(layer)) for name in templates)


def _derived(architecture: Architecture, model: ModelShape, source: Source) -> tuple[str, ...]:
    if source.layout != "hf":
        return ()
    patterns = [pattern.replace("{layer}", "*") for pattern in architecture.derived]
    return tuple(name for name in source.specs if any(fnmatchcase(name, pattern) for pattern in patterns))


def _check_consumed(jobs: Iterable[Job], derived: tuple[str, ...], source: Source) -> None:
    uses = Counter(name for job in jobs for name in (*job.reads, *job.copies))
    uses.update(derived)
    missing = [name for name in uses if name not in source.specs]
    if missing:
        raise MissingTensor(
            f"{_listed(missing)} missing from the checkpoint",
            where=f"architecture {source.model.architecture}",
            do="Is a shard missing, or does the config describe another model?",
        )
    unmapped = [name for name in source.specs if not uses[name]]
    if unmapped:
        raise UnmappedTensor(
            f"no row for {_listed(unmapped)}",
            where=f"architecture {source.model.architecture}",
            do="Nothing is dropped in silence: does the config describe this model? "
            "If the family has such tensors, add a row to its table under precisionctl/architectures/.",
        )
    assert all(count == 1 for count in uses.values()), "a table names a tensor twice"


def _listed(found: list[str]) -> str:
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(f"`{name}`" for name in found[:3]) + more


def _targets(
    job: Job, model: ModelShape, target: Layout, specs: Mapping[str, TensorSpec], dtype: torch.dtype | None
) -> dict[str, TensorSpec]:
    kept = [torch.bfloat16 if specs[name].dtype.itemsize == 1 else specs[name].dtype for name in job.reads]
    made = dtype
    if made is None:
        made = torch.bfloat16 if not kept else kept[0]
        for other in kept[1:]:
            made = torch.promote_types(made, other)
    shapes = layout_shapes(job.row, model, target)
    parallel = job.row.parallel if target == "megatron" else REPLICATED
    return {name: TensorSpec(shape, made, parallel) for name, shape in zip(job.writes, shapes, strict=False)}


def layout_shapes(row: Row, model: ModelShape, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Shapes of a row's tensors in one layout."""
    whole = row.shape(model)
    if layout == "megatron":
        return (whole,)
    return tuple((rows, *whole[1:]) for rows in layout_parts(row, model))


_VALUES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
"""What a tensor can hold; the readers have made sure that FP8 codes have scales."""


def _check_dtypes(job: Job, source: Source) -> None:
    for name in (*job.reads, *job.copies):
        if source.specs[name].dtype not in _VALUES:
            dtype = str(source.specs[name].dtype).removeprefix("torch.")
            raise PrecisionError(f"`{name}` is {dtype}", do="Known are values in BF16, FP16 and FP32, and E4M3 codes.")


def _check_shapes(job: Job, model: ModelShape, source: Source) -> None:
    for name, expected in zip(job.reads, layout_shapes(job.row, model, source.layout), strict=False):
        found = source.specs[name].shape
        if found != expected:
            raise ShapeMismatch(
                f"`{name}` is {list(found)}, the model's sizes say {list(expected)}",
                where=f"architecture {model.architecture}",
                do="Does the config belong to this checkpoint?",
            )


def _check_division(job: Job, model: ModelShape, tensor_parallel: int) -> None:
    shape, parallel = job.row.shape(model), job.row.parallel
    if parallel.kind == "replicated":
        return
    size = shape[1] if parallel.kind == "columns" else shape[0] // parallel.parts
    if size % tensor_parallel:
        raise ShapeMismatch(f"`{job.name}` {list(shape)} cannot be cut into {tensor_parallel} tensor-parallel parts")


def check_fp8_gemm(job: Job, model: ModelShape) -> None:
    """Raise PrecisionError where an FP8 GEMM does not take a weight's shape."""
    shape = job.row.shape(model)
    if any(size % GEMM_ALIGNMENT for size in shape):
        raise PrecisionError(
            f"`{job.name}` is {list(shape)}: FP8 GEMMs need multiples of {GEMM_ALIGNMENT}",
            do="Keep the module in BF16 (keep_bf16 in a recipe), or use --precision bf16.",
        )
