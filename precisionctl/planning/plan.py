"""Plan: every job of a conversion and every tensor of its result, checked before any tensor is read.

Names are logical: one per layer and expert, with no rank, stage or stacking. Each source tensor is consumed by
exactly one job and each target tensor is produced by exactly one. A job is one Megatron row (the fused
group), also from Hugging Face to Hugging Face, because q/k/v and gate/up share an FP8 scale.
"""

import dataclasses
import hashlib
import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from precisionctl.architectures.param_map import Row
from precisionctl.errors import PrecisionError
from precisionctl.model_shape import ModelShape
from precisionctl.param import ONE_RANK, Layout, Parallelism, TensorSpec
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
    def outputs(self) -> Sequence[str]:
        """The tensors that it writes, scales included."""
        encode = self.encode
        return (*self.writes, *encode.weight_scales.values(), *encode.input_scales) if encode else self.writes

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

    def computes(self, job: Job) -> bool:
        """Whether a job's tensors must be whole in memory, because its row does more than move their rows."""
        return bool(job.reads) and self.source != self.target and not job.row.moves(self.model)

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
