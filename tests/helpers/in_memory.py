"""A checkpoint whose tensors are in memory, as Reader and Writer; and exports made from one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from precisionctl.architectures.families import to_hf_config
from precisionctl.architectures.param_map import Naming
from precisionctl.checkpoints.base import Companions, Reader
from precisionctl.checkpoints.chunks import Chunk, read_tensor, whole
from precisionctl.checkpoints.huggingface import HuggingFaceReader, HuggingFaceWriter
from precisionctl.codes.encoding import Encoding
from precisionctl.codes.numerics import ScaleRounding
from precisionctl.conversion.convert import convert
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.dtypes import DType
from precisionctl.engines.base import engines
from precisionctl.export.encode import WeightFormat, encode, fp8_jobs, in_scheme
from precisionctl.fp8.delayed_scaling import after_one_update
from precisionctl.fp8.state import ROLES, DelayedScaling, Fp8State, Fp8States
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import ONE_RANK, Layout, Parallelism, TensorSpec
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.served_model import served
from precisionctl.precision import PRESETS
from precisionctl.quant_methods.base import SCHEMES, Scheme, quant_methods
from precisionctl.quant_methods.scales import Scales


@dataclass
class InMemory:
    model: ModelShape
    layout: Layout
    tensors: Mapping[str, Tensor]
    fp8: Fp8States | None = None
    companions: Companions = Companions()
    encodings: Mapping[str, Encoding] = field(default_factory=dict)
    container: str = "memory"
    path: Path | None = None
    iteration: int | None = None
    files: Sequence[Path] = ()

    @cached_property  # as it is asked for with every row
    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(tuple(values.shape), DType.of(values.dtype)) for name, values in self.tensors.items()}

    def chunks(self, name: str) -> Sequence[Chunk]:
        return [Chunk(whole(self.specs[name]), self.tensors[name])]

    def lay_out(self) -> None:
        pass

    def finish(self, fp8: Fp8States | None) -> None:
        self.fp8 = fp8


@dataclass
class Described:
    """A Hugging Face directory of which only names and shapes are known."""

    model: ModelShape
    specs: dict[str, TensorSpec]
    path: Path | None = None
    layout: Layout = "hf"


@contextmanager
def no_progress() -> Iterator[Callable[[int], None]]:
    """What nobody watches."""
    yield lambda count: None


def to_megatron(reader: Reader, *, parallelism: Parallelism = ONE_RANK) -> InMemory:
    """The same model in Megatron's layout."""
    plan = make_plan(reader, "megatron", parallelism=parallelism)
    tensors = {name: torch.empty(spec.shape, dtype=spec.dtype.torch) for name, spec in plan.targets.items()}
    made = InMemory(plan.model, "megatron", tensors, companions=reader.companions)
    convert(plan, reader, made)
    made.finish(reader.fp8)
    return made


def to_hf(reader: Reader, *, naming: Naming = "as stored", dtype: DType | None = None) -> InMemory:
    """The same model in Hugging Face's layout; what nothing writes stays NaN, or of integers -1."""
    plan = make_plan(reader, "hf", naming=naming, dtype=dtype)

    def unwritten(spec: TensorSpec) -> Tensor:
        empty = torch.empty(spec.shape, dtype=spec.dtype.torch)
        return empty.fill_(float("nan") if spec.dtype.is_floating_point or spec.is_codes else -1)

    tensors = {name: unwritten(spec) for name, spec in plan.targets.items()}
    made = InMemory(plan.model, "hf", tensors, companions=reader.companions)
    convert(plan, reader, made)
    return made


def recorded(reader: Reader, *, seed: int = 0) -> Fp8States:
    """State in which every role of every FP8 GEMM has recorded an amax once."""
    generator = torch.Generator().manual_seed(seed)
    recipe = DelayedScaling(amax_history_len=4)
    modules = {}
    for name, shape in make_plan(reader, "megatron").gemms.items():
        amaxes = 1 + 3 * torch.rand(len(ROLES), *shape, generator=generator)
        modules[name] = Fp8State(
            {role: after_one_update(amax, role, recipe) for role, amax in zip(ROLES, amaxes, strict=True)}
        )
    return Fp8States(recipe, modules, iteration=7, of_weights=digest_weights(reader))


def with_state(reader: Reader, *, seed: int = 0) -> InMemory:
    """The same checkpoint with recorded state."""
    tensors = {name: read_tensor(reader, name) for name in reader.specs}
    return InMemory(reader.model, reader.layout, tensors, recorded(reader, seed=seed), reader.companions)


def export(
    source: Reader, directory: Path, method: str, scheme: Scheme, rounding: ScaleRounding = "FP32"
) -> HuggingFaceReader:
    """`source` exported for inference, with what any engine looks for in config.json, and opened."""
    form = WeightFormat(quant_methods()[method], scheme, rounding)
    values = make_plan(source, "hf", dtype=DType.bfloat16, naming="as saved")
    layout = served(values.model, values.targets, 1, expert_parallel=False)
    shapes, block = engines()["vllm"].shapes, SCHEMES[scheme].block

    def refusal(name: str, spec: TensorSpec, scales: Scales) -> str | None:
        return shapes.refusal(name, spec, block, layout, method)

    jobs = fp8_jobs(values, PRESETS["fp8-delayed"])
    plan = encode(
        values,
        in_scheme(
            values,
            jobs,
            source.fp8,
            form,
            refusal,
            why_no_state="",
            advice=lambda left: "",
            keep_refused=False,
            kept=None,
        ),
    )
    directory.mkdir()
    writer = HuggingFaceWriter(
        directory,
        plan.targets,
        source.companions,
        to_hf_config(source.model, "bfloat16"),
        quantization=plan.quantization,
        extra_files=plan.files,
        lacks=lambda config: [key for engine in engines().values() for key in engine.lacks(config)],
    )
    convert(plan, source, writer)
    writer.finish(None)
    return HuggingFaceReader(directory)
