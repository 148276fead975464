"""Plan: every job of a conversion and every tensor of its result, checked before any tensor is read.

Names are logical: one per layer and expert, with no rank, stage or stacking. Each of the source's weights is consumed
by exactly one job, and each target tensor is produced by exactly one. Jobs of an optimizer also read weights that have
no master, as their own, and those of a model that becomes its masters read these in their place. A job is one Megatron
row (the fused group), also from Hugging Face to Hugging Face, because q/k/v and gate/up share an FP8 scale; where
several jobs have what shares one, a ScaleGroup names their weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from precisionctl.architectures.param_map import Row
from precisionctl.architectures.wrappers import TOWERS
from precisionctl.codes.elements import CodesInRows
from precisionctl.codes.numerics import ScaleRounding
from precisionctl.codes.row_factors import RowFactors
from precisionctl.errors import PrecisionError, at
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import MOMENTUM, ONE_RANK, Layout, Parallelism, TensorSpec, kind_and_parameter
from precisionctl.planning.segments import keeps_tensors
from precisionctl.precision import Precision
from precisionctl.quant_methods.scales import Scales

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ScaleGroup:
    """Weights that get the one scale (with four bits: the one global scale) of their joint amax. Engines compute q/k/v,
    and gate/up, as one, and would requantize or compute wrong results if their scales differed.

    `jobs` write them: one, but for DeepSeek's latents, MiniMax-M3's indexer and models without a table, of which
    Megatron, or the table that is read off, has each as a GEMM of its own. `always`: weights that had different scales
    before, which somebody chose, share one too.
    """

    weights: Mapping[str, Scales]
    jobs: tuple[Job, ...]
    always: bool


@dataclass(frozen=True)
class JobCodes:
    """Which weights of a job become codes, in their target's dtype, and which scales are written with them.

    `weights`: for each such weight, its Scales: how many rows and columns share a scale, and the tensors for the grid
    of `scale_inv` and the rest of the encoding. The job's other tensors stay values. `known`: tensors with a
    single number that is already known, and that number: scales of inputs, or of a KV cache. `group`: the weights with
    which they share a scale, themselves included. `scale_rounding`: what new scales of weights are rounded up to.
    """

    weights: Mapping[str, Scales]
    known: Mapping[str, float]
    group: ScaleGroup | None = None
    scale_rounding: ScaleRounding = "FP32"

    @property
    def measured(self) -> Mapping[str, Scales]:
        """The weights on whose values the scales of these depend."""
        return self.group.weights if self.group else self.weights

    @property
    def scale_tensors(self) -> tuple[str, ...]:
        """The names of the tensors that are written beside the codes."""
        return (*(name for scales in self.weights.values() for name in scales.of_weight), *self.known)

    def describe(self) -> dict[str, object]:
        """As JSON; `dataclasses.asdict` copies all that is in it, which takes ten times as long."""
        weights = {
            name: {key: getattr(scales, key) for key in Scales.__slots__} for name, scales in self.weights.items()
        }
        return vars(self) | {"weights": weights, "group": [*self.group.weights] if self.group else None}


@dataclass(frozen=True, slots=True)
class Job:
    """The work for one row of a family's table at one place (layer, expert): which tensors it reads and writes.

    `name` is the Megatron parameter, `module` its module. `reads` is empty where biases of the target are filled with
    zeros, and `writes` where biases of the source have no place and must be zero. `copies` are tensors that the source
    stores as copies of `reads[0]` (a tied `lm_head`), and must equal it; names in `writes` beyond the row's own are
    copies of its first. `codes` says which of `writes` become codes, and `factors` which are multiplied, and with what.
    """

    name: str
    row: Row
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    copies: tuple[str, ...] = ()
    codes: JobCodes | None = None
    factors: Mapping[str, RowFactors] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def weights(self) -> Sequence[str]:
        """The tensors that the job writes and that an export encodes if it encodes this job."""
        if not self.row.values:
            return self.writes
        values = {name for template, name in zip(self.row.hf, self.writes, strict=False) if template in self.row.values}
        return [name for name in self.writes if name not in values]

    @property
    def outputs(self) -> Sequence[str]:
        """The names of all tensors that the job writes, with scales."""
        return (*self.writes, *self.codes.scale_tensors) if self.codes else self.writes

    @property
    def expert(self) -> int | None:
        """The number of the expert whose parameter it is; None for others."""
        return int(self.name.rpartition(".")[2].strip(string.ascii_letters)) if self.row.of_experts else None


@dataclass(frozen=True)
class Plan:
    """All of a conversion: `jobs`, and the `targets` that they write, in the order of the files.

    `model` is the target's: its vocabulary may be padded to another size than the source's. `derived` are tensors of
    the source that are left out because they can be computed (`rotary_emb.inv_freq`). `quantization` is the
    `quantization_config` of a result with codes, and `files` are what says it beside config.json, by name.
    """

    model: ModelShape
    from_layout: Layout
    to_layout: Layout
    jobs: tuple[Job, ...]
    targets: Mapping[str, TensorSpec]
    derived: tuple[str, ...] = ()
    parallelism: Parallelism = ONE_RANK
    quantization: Mapping[str, object] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all targets."""
        return sum(spec.nbytes for spec in self.targets.values())

    @property
    def muon_rows(self) -> list[Row]:
        """The rows of the matrices that a Muon trained, whose momentum comes along."""
        return [job.row for job in self.jobs if kind_and_parameter(job.name)[0] == MOMENTUM]

    @property
    def encodes(self) -> bool:
        """Whether jobs write codes, or scales."""
        return any(job.codes for job in self.jobs)

    @property
    def codes(self) -> list[str]:
        """The names of the weights that become codes with tensors of scales beside them, as their jobs say."""
        return [name for job in self.jobs if job.codes for name in job.codes.weights]

    @property
    def coded_weight_count(self) -> int:
        """How many weights of the result are codes, those of GGUF and MLX included, which are casts and not in
        `codes`."""
        in_rows = (isinstance(spec.packing, CodesInRows) for spec in self.targets.values())
        return len(self.codes) + sum(in_rows)

    @property
    def text(self) -> Plan:
        """The plan without a wrapper's towers, with which nothing here computes."""
        return self if self.model.wrapper is None else self.of_jobs(lambda job: not job.name.startswith(TOWERS))

    @property
    def text_alone(self) -> Plan:
        """`text` with the names that a text model alone has. The target is Hugging Face's layout."""
        if (wrapper := self.model.wrapper) is None:
            return self
        plan, alone = self.text, wrapper.name_alone
        jobs = (replace(job, writes=tuple(map(alone, job.writes))) for job in plan.jobs)
        targets = {alone(name): spec for name, spec in plan.targets.items()}
        return replace(plan, jobs=tuple(jobs), targets=targets)

    @property
    def towers(self) -> Plan:
        """The part of a wrapper's plan that is of towers."""
        assert self.model.wrapper is not None, "a text model has none"
        return self.of_jobs(lambda job: job.name.startswith(TOWERS))

    def of_jobs(self, kept: Callable[[Job], bool]) -> Plan:
        """The part of the plan that these jobs write."""
        jobs = tuple(filter(kept, self.jobs))
        return replace(self, jobs=jobs, targets={name: self.targets[name] for job in jobs for name in job.outputs})

    def job_bytes(self, job: Job) -> int:
        """Bytes that a job writes, its scales included."""
        return sum(self.targets[name].nbytes for name in job.outputs)

    @property
    def gemms(self) -> Mapping[str, tuple[int, ...]]:
        """Modules whose GEMM an FP8 recipe computes in FP8, and the shape of their scales: `[]`, or `[experts]`."""
        gemms = [job for job in self.jobs if job.row.gemm and not job.row.unused]
        experts = Counter(job.module for job in gemms if job.row.of_experts)
        return {job.module: (experts[job.module],) if job.row.of_experts else () for job in gemms}

    def computes(self, job: Job) -> bool:
        """Whether a job's tensors must be whole in memory, because its row does more than move runs of rows."""
        if not job.reads or keeps_tensors(job.row, self.from_layout, self.to_layout):
            return False
        passed = ([job.row.source] if self.from_layout == "hf" else []) + ([job.row] if self.to_layout == "hf" else [])
        return any(row.rearrangement.moves_single_rows or not row.moves_rows(self.model) for row in passed)

    def compute(self, job: Job, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors that such a job writes, from the values of all that it reads."""
        with at(job.reads[0]):
            whole = parts[0] if self.from_layout == "megatron" else job.row.source.merge(parts, self.model)
            return (whole,) if self.to_layout == "megatron" else job.row.split(whole, self.model)

    def describe(self) -> dict[str, object]:
        """The plan as JSON: what `--dry-run --json` prints, and what `digest` covers."""
        return {
            "model": self.model.described(),
            "source": self.from_layout,
            "target": self.to_layout,
            "parallelism": dataclasses.asdict(self.parallelism),
            "jobs": [
                {"name": job.name, "reads": job.reads, "writes": job.writes, "copies": job.copies}
                | ({"codes": job.codes.describe()} if job.codes else {})
                for job in self.jobs
            ],
            "targets": {name: {"shape": spec.shape, "dtype": spec.stored_dtype} for name, spec in self.targets.items()},
            "derived": self.derived,
            "quantization": self.quantization,
        }

    @cached_property  # the command's digest has it, and the manifest
    def digest(self) -> str:
        """SHA-256 of `describe()`."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()


def check_fp8_gemms(plan: Plan, precision: Precision) -> None:
    """Raise PrecisionError for a weight that `precision` has in FP8 and whose shape no FP8 GEMM takes. `precision` must
    know the plan's number of layers (`of_layers`)."""
    for job in plan.jobs:
        shape = job.row.shape(plan.model) if job.row.gemm and precision.in_fp8(job.module) else ()
        if misfit := precision.misfit(shape):
            do = "Keep the module in BF16 (keep_bf16 in a recipe), or use --precision bf16."
            raise PrecisionError(f"`{job.name}` is {list(shape)}: {misfit}", do=do)
