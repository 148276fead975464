"""Plan: every job of a conversion and every tensor of its result, checked before any tensor is read.

Names are logical: one per layer and expert, with no rank, stage or stacking. Each source tensor is consumed by
exactly one job and each target tensor is produced by exactly one. A job is one Megatron row (the fused
group), also from Hugging Face to Hugging Face, because q/k/v and gate/up share an FP8 scale.
"""

import dataclasses
import hashlib
import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

import torch

from precisionctl.architectures.find import architecture_of
from precisionctl.architectures.param_map import Alias, Architecture, Row, filled, names
from precisionctl.errors import MappingError, MissingTensor, PrecisionError
from precisionctl.model_shape import ModelShape
from precisionctl.param import ONE_RANK, REPLICATED, Layout, Parallelism, TensorSpec
from precisionctl.planning import checks
from precisionctl.planning.encode import Encode
from precisionctl.precision import Precision


@dataclass(frozen=True)
class Job:
    """One row at one place. `name` is the Megatron parameter, `module` its module.

    `reads` is empty where the target's biases are filled with zeros, `writes` where the source's must be
    zero to be left out. `copies` are stored copies (a tied `lm_head`) that must equal `reads[0]`. What `writes`
    holds beyond the row's tensors are copies of its first.
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

    @property
    def expert(self) -> int | None:
        """The expert's number, in the name of its parameter."""
        return int(self.name.rpartition(".")[2].strip(string.ascii_letters)) if self.row.of_experts else None


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
    def gemms(self) -> Mapping[str, tuple[int, ...]]:
        """Modules whose GEMM an FP8 recipe computes in FP8, and the shape of their scales: `[]`, or `[experts]`."""
        experts = (self.model.moe.num_experts,) if self.model.moe else ()
        return {job.module: experts if job.row.of_experts else () for job in self.jobs if job.row.gemm}

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


@runtime_checkable
class OptimizerSource(Protocol):
    """A Reader that has the state of an optimizer too: `optimizer.state.<kind>.<parameter>`."""

    @property
    def optimizer_specs(self) -> Mapping[str, TensorSpec]: ...


def make_plan(
    source: Source,
    target: Layout,
    *,
    dtype: torch.dtype | None = None,
    parallelism: Parallelism = ONE_RANK,
    optimizer: bool = False,
    respelled: bool = False,
) -> Plan:
    """Plan the way from `source` to a checkpoint of layout `target`.

    `dtype` is that of every target tensor but those that keep theirs; None keeps each as stored, FP8 codes decoded to
    BF16. `optimizer` takes the state of a Megatron source's optimizer along, in the dtype that it is stored in.
    `respelled` gives experts that a Hugging Face source has fused the names that the model's own class saves.
    Raises UnknownArchitecture, UnmappedTensor, MissingTensor, ShapeMismatch, MappingError or PrecisionError.
    """
    architecture = architecture_of(source.model.architecture)
    if target == "megatron" and architecture.refused:
        raise MappingError(
            f"{source.model.architecture} has {architecture.refused}, which Megatron-Core does not",
            do="It can be read, exported and verified as a Hugging Face directory.",
        )
    rows = architecture.spelled(source.specs if source.layout == "hf" else {}, source.model, respelled)
    found = _with_mtp(source, rows)
    model = found.padded(parallelism.tensor) if target == "megatron" else found
    if target == "megatron":
        checks.check_biases(model)
    parallelism = checks.dealt(model.num_layers, parallelism)
    checks.check_ranks(model, parallelism)
    derived = _derived(architecture, source)
    by_row = {row: _row_jobs(row, architecture.aliases, model, source, target) for row in rows}
    jobs = [job for wanted in by_row.values() for job in wanted]
    _check_consumed(jobs, derived, source)
    targets: dict[str, TensorSpec] = {}
    for row, wanted in by_row.items():
        if not wanted:
            continue
        read, written = row.source.shapes(found, source.layout), row.shapes(model, target)
        for job in wanted:
            targets |= _targets(job, written, target, source.specs, dtype)
            stored = {name: source.specs[name] for name in (*job.reads, *job.copies)}
            checks.check_dtypes(stored)
            checks.check_shapes(stored, (*read[: len(job.reads)], *read[:1] * len(job.copies)), model.architecture)
        checks.check_division(row, model, parallelism)
    if optimizer:
        carried = _optimizer_jobs(jobs, source, target)
        jobs += carried
        for job in carried:
            stored = {job.name: _optimizer(source)[job.name]}
            checks.check_shapes(stored, [job.row.shape(found)], model.architecture)
            targets[job.name] = TensorSpec(job.row.shape(model), stored[job.name].dtype, job.row.parallel)
    return Plan(model, source.layout, target, tuple(jobs), targets, derived, parallelism)


def _with_mtp(source: Source, rows: Iterable[Row]) -> ModelShape:
    """The source's model, without the multi-token prediction layers that it claims if it has none of their tensors:
    transformers reads and writes such checkpoints without them."""
    of_mtp = [row for row in rows if "{mtp}" in row.megatron and not row.of_experts]
    first = {"mtp": 0, "mtp_layer": source.model.num_layers}
    if any(name in source.specs for row in of_mtp for name in names(row, source.layout, first)):
        return source.model
    return dataclasses.replace(source.model, mtp_num_layers=0)


def _row_jobs(row: Row, aliases: Iterable[Alias], model: ModelShape, source: Source, target: Layout) -> list[Job]:
    """The jobs of one row, at each of its places."""
    here, there = row.present.in_layout(source.layout, model), row.present.in_layout(target, model)
    if not here and not there:
        return []
    if row.count(model) > len(source.specs):  # before a loop over as many as a config may claim
        raise MissingTensor(
            f"{row.count(model)} of `{row.megatron}`, but only {len(source.specs)} tensors", do="Is a shard missing?"
        )
    copies = [alias for alias in aliases if alias.of in row.source.hf and getattr(model, alias.switch)]
    jobs = []
    for place in row.places(model):
        reads = names(row.source, source.layout, place) if here else ()
        writes = names(row, target, place) if there else ()
        stored = _copies(copies, model) if source.layout == "hf" else ()
        kept = _copies((alias for alias in copies if alias.written), model) if target == "hf" else ()
        stored = tuple(name for name in stored if name in source.specs)
        jobs.append(Job(names(row, "megatron", place)[0], row, reads, (*writes, *kept), stored))
    return jobs


def _copies(aliases: Iterable[Alias], model: ModelShape) -> tuple[str, ...]:
    return tuple(
        filled(alias.hf, {"mtp_layer": model.num_layers + mtp})
        for alias in aliases
        for mtp in range(model.mtp_num_layers if "{mtp_layer}" in alias.hf else 1)
    )


def _derived(architecture: Architecture, source: Source) -> tuple[str, ...]:
    if source.layout != "hf":
        return ()
    patterns = [pattern.replace("{layer}", "*") for pattern in architecture.derived]
    return tuple(name for name in source.specs if any(fnmatchcase(name, pattern) for pattern in patterns))


def _check_consumed(jobs: Iterable[Job], derived: tuple[str, ...], source: Source) -> None:
    uses = Counter(name for job in jobs for name in (*job.reads, *job.copies))
    uses.update(derived)
    missing = [name for name in uses if name not in source.specs]
    unexpected = [name for name in source.specs if not uses[name]]
    do = "Is a shard missing, or does the config describe another model?" if missing else _UNEXPECTED
    checks.check_names(missing, unexpected, f"architecture {source.model.architecture}", do)
    assert all(count == 1 for count in uses.values()), "a table names a tensor twice"


_UNEXPECTED = (
    "Nothing is dropped in silence: does the config describe this model? "
    "If the family has such tensors, add a row to its table under precisionctl/architectures/."
)


def _targets(
    job: Job,
    shapes: tuple[tuple[int, ...], ...],
    target: Layout,
    specs: Mapping[str, TensorSpec],
    dtype: torch.dtype | None,
) -> dict[str, TensorSpec]:
    kept = [torch.bfloat16 if specs[name].dtype.itemsize == 1 else specs[name].dtype for name in job.reads]
    made = None if job.row.keeps_dtype else dtype
    if made is None:
        made = torch.bfloat16 if not kept else kept[0]
        for other in kept[1:]:
            made = torch.promote_types(made, other)
    parallel = job.row.parallel if target == "megatron" else REPLICATED
    return {
        name: TensorSpec(shapes[number] if number < len(shapes) else shapes[0], made, parallel)
        for number, name in enumerate(job.writes)
    }


_STATE = re.compile(r"optimizer\.state\.[a-z_]+\.(.+)")


def _optimizer(source: Source) -> Mapping[str, TensorSpec]:
    return source.optimizer_specs if isinstance(source, OptimizerSource) else {}


def _optimizer_jobs(jobs: Iterable[Job], source: Source, target: Layout) -> list[Job]:
    """A job for each of the source's optimizer tensors, which are as parallel as their parameters.

    Raises MappingError where the state is not stored by parameter, or goes to Hugging Face, which has no place
    for it.
    """
    if target == "hf":
        raise MappingError("Hugging Face has no place for an optimizer", do="Leave it behind.")
    rows = {job.name: replace(job.row, gemm=False) for job in jobs}
    carried = []
    for name in _optimizer(source):
        match = _STATE.fullmatch(name)
        if match is None or match[1] not in rows:
            raise MappingError(
                f"`{name}` is no state of a parameter of this model",
                do="Drop the optimizer (--drop-optimizer), or save it in a form that is stored by parameter.",
            )
        carried.append(Job(name, rows[match[1]], (name,), (name,)))
    return carried


def check_fp8_gemms(plan: Plan, precision: Precision) -> None:
    """Raise PrecisionError where an FP8 GEMM does not take the shape of a weight that is to be in FP8. `precision` is
    of the plan's layers."""
    for job in plan.jobs:
        if job.row.gemm and precision.in_fp8(job.module):
            _check_fp8_gemm(job, plan.model, precision.alignment)


def _check_fp8_gemm(job: Job, model: ModelShape, alignment: int) -> None:
    shape = job.row.shape(model)
    if any(size % alignment for size in shape):
        raise PrecisionError(
            f"`{job.name}` is {list(shape)}: FP8 GEMMs need multiples of {alignment}",
            do="Keep the module in BF16 (keep_bf16 in a recipe), or use --precision bf16.",
        )
