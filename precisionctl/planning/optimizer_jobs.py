"""Jobs for an optimizer: FP32 masters and moments go the way of their parameter, whatever trainer has saved them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from precisionctl.architectures.rearrangements import SAME, Gamma
from precisionctl.errors import DROP_OPTIMIZER, MappingError, MissingTensor
from precisionctl.param import KINDS, MOMENTUM, NOT_TRAINED, Layout, TensorSpec, kind_and_parameter, state_name
from precisionctl.planning.checks import check_names
from precisionctl.planning.plan import Job
from precisionctl.sizes import counted


@runtime_checkable
class OptimizerSource(Protocol):
    """A Reader that has the state of an optimizer too: `optimizer.state.<kind>.<parameter>`, with the parameter's name
    in the source's layout. Under Hugging Face's names a weight without a master is its own."""

    @property
    def layout(self) -> Layout: ...
    @property
    def optimizer_specs(self) -> Mapping[str, TensorSpec]: ...


DROP = "Drop the optimizer (--drop-optimizer), or save it in a form that is stored by parameter."


def optimizer_jobs(jobs: Sequence[Job], source: OptimizerSource, target: Layout, *, masters: bool) -> Iterator[Job]:
    """The jobs for the optimizer's tensors of the parameters in `jobs`, with the `masters` or without.

    From a source with Hugging Face's names each parameter gets masters and moments: its trainer keeps all, and zeros
    that only Megatron has were never trained. An indexer may have no moments: no gradient comes to it in transformers.
    Then they are zeros, with which AdamW begins. Raises MappingError for state of no parameter, and MissingTensor for a
    parameter with moments of some of its tensors, or of others alone. Matrices may have Muon's momentum in their place,
    for Megatron all that its Muon takes.
    """
    kinds: dict[str, list[str]] = {}  # of each parameter
    for name in source.optimizer_specs:
        kind, parameter = kind_and_parameter(name)
        kinds.setdefault(parameter, []).append(kind)
    whole, missing, untrained = source.layout == "hf", list[str](), list[str]()
    has_muon = whole and target == "megatron" and any(MOMENTUM in found for found in kinds.values())
    for job in jobs:
        stored = [kinds.pop(name, []) for name in job.reads]
        if job.name.endswith(NOT_TRAINED) and not any(stored):
            continue
        by_muon = any(MOMENTUM in each for each in stored)
        if has_muon and by_muon != _muon_takes(job):
            who, does = ("Muon", "does not take it") if by_muon else ("AdamW", "takes it")
            what = f"`{job.reads[0]}` was trained by {who}, and Megatron's Muon {does}: it takes all matrices but "
            raise MappingError(f"{what}embeddings and output layer", do=DROP_OPTIMIZER)
        no_gradient = whole and job.row.layers == "indexed" and not any(stored)
        usual: tuple[str, ...] = ("param", MOMENTUM) if by_muon else KINDS
        for kind in dict.fromkeys((*(usual if whole else ()), *(kind for each in stored for kind in each))):
            reads = tuple(state_name(kind, name) for name in job.reads)
            lacking = [read for read, each in zip(reads, stored, strict=True) if kind not in each]
            if kind == "param" and lacking == [*reads]:
                reads = job.reads
            elif no_gradient:
                reads = ()
            elif lacking:
                missing += lacking
                untrained += (name for name, each in zip(job.reads, stored, strict=True) if not each)
                continue
            row = replace(job.row, gemm=False)
            if kind != "param" and isinstance(row.rearrangement, Gamma):
                row = replace(row, rearrangement=SAME)  # moments do not change if 1 is subtracted from a weight
            own = job.writes[: len(row.hf) if target == "hf" else 1]
            writes = tuple(state_name(kind, name) for name in own)
            # Masters without a place are left out: the model's own job checks that such a weight is zero
            if (writes and masters) or kind != "param":
                yield Job(state_name(kind, job.name), row, reads, writes)
    if kinds:
        parameter, (kind, *_) = next(iter(kinds.items()))
        what = f"`{state_name(kind, parameter)}`" if kind in KINDS else f"`{parameter}`"
        raise MappingError(f"{what} is not the state of a parameter of this model", do=DROP)
    if whole and untrained:
        them = f"{counted(len(set(untrained)), 'parameter')}, such as `{untrained[0][:90]}`"
        raise MissingTensor(
            f"the optimizer has no state of {them}: frozen, or trained by another optimizer than Adam",
            do="It is carried for all parameters or for none: Megatron looks for the state of each that it trains, and "
            f"`resume` trains all. {DROP_OPTIMIZER}",
        )
    check_names(missing, [], f"Was it another optimizer than Adam? {DROP_OPTIMIZER}")


_NOT_MUONS = ("embedding.word_embeddings.weight", "output_layer.weight")


def _muon_takes(job: Job) -> bool:
    """Whether Megatron's Muon takes a parameter (megatron/core/optimizer/muon.py)."""
    return len(job.row.sizes) == 2 and job.name not in _NOT_MUONS


def reading_masters(jobs: Iterable[Job], source: OptimizerSource) -> list[Job]:
    """The jobs of a model whose weights are to be its FP32 masters, where there are any; copies are of weights."""
    found, read = source.optimizer_specs, []
    for job in jobs:
        masters = tuple(state_name("param", name) for name in job.reads)
        has_all = bool(masters) and all(name in found for name in masters)
        read.append(replace(job, reads=masters, copies=()) if has_all else job)
    return read
