"""Jobs for an optimizer: FP32 masters and moments go the way of their parameter, whatever trainer has saved them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, runtime_checkable

from precisionctl.architectures.param_map import Row
from precisionctl.architectures.rearrangements import SAME, Gamma
from precisionctl.errors import DROP_OPTIMIZER, MappingError, MissingTensor
from precisionctl.param import (
    KINDS,
    MOMENTUM,
    NOT_TRAINED,
    Layout,
    TensorSpec,
    kind_and_parameter,
    muon_takes,
    state_name,
)
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


def optimizer_jobs(jobs: Sequence[Job], source: OptimizerSource, target: Layout, *, masters: bool) -> list[Job]:
    """The jobs for the optimizer's tensors of the parameters in `jobs`, with the `masters` or without.

    From a source with Hugging Face's names each parameter gets masters and moments: its trainer keeps all, and zeros
    that only Megatron has were never trained. An indexer may have no moments: no gradient comes to it in transformers.
    Then they are zeros, with which AdamW begins. Raises MappingError for state of no parameter, and MissingTensor for a
    parameter with moments of some of its tensors, or of others alone. Matrices may have Muon's momentum in their place,
    for Megatron all that its Muon takes.
    """
    stored: dict[str, list[str]] = {}  # the kinds of state of each parameter
    for name in source.optimizer_specs:
        kind, parameter = kind_and_parameter(name)
        stored.setdefault(parameter, []).append(kind)
    in_hf = source.layout == "hf"
    every = [_ParameterState(job, [stored.get(name, []) for name in job.reads], in_hf) for job in jobs]
    states = [state for state in every if any(state.stored) or not state.job.name.endswith(NOT_TRAINED)]

    read = {name for job in jobs for name in job.reads}
    for parameter, (kind, *_) in stored.items():
        if parameter not in read:
            what = f"`{state_name(kind, parameter)}`" if kind in KINDS else f"`{parameter}`"
            raise MappingError(f"{what} is not the state of a parameter of this model", do=DROP)

    untrained = list(dict.fromkeys(name for state in states for name in state.untrained))
    if untrained:
        raise MissingTensor(
            f"the optimizer has no state of {counted(len(untrained), 'parameter')}, such as `{untrained[0][:90]}`: "
            "frozen, or trained by another optimizer than Adam and Muon",
            do="It is carried for all parameters or for none: Megatron looks for the state of each that it trains, and "
            f"`resume` trains all. {DROP_OPTIMIZER}",
        )
    missing = [name for state in states for kind in state.kinds for name in state.lacking(kind)]
    check_names(missing, [], f"Was it another optimizer than Adam? {DROP_OPTIMIZER}")

    if in_hf and target == "megatron" and any(MOMENTUM in kinds for kinds in stored.values()):
        for state in states:
            if state.by_muon != muon_takes(state.job.name, len(state.job.row.sizes)):
                trained = f"was trained by {'Muon' if state.by_muon else 'AdamW'}"
                was = trained if any(state.stored) else "has no optimizer state"
                does = "does not take it" if state.by_muon else "takes it"
                what = f"`{state.job.reads[0]}` {was}, and Megatron's Muon {does}: it takes all matrices but "
                raise MappingError(f"{what}embeddings and output layer", do=DROP_OPTIMIZER)

    # Masters without a place are left out: the model's own job checks that such a weight is zero
    made = [(kind, state.job_of(kind, target)) for state in states for kind in state.kinds]
    return [job for kind, job in made if kind != "param" or (masters and job.writes)]


@dataclass(frozen=True)
class _ParameterState:
    """An optimizer's state of the parameter of a job: `stored` are the kinds that the source has of each tensor that
    the job reads; `in_hf` says whether it has Hugging Face's names."""

    job: Job
    stored: Sequence[Sequence[str]]
    in_hf: bool

    @property
    def by_muon(self) -> bool:
        return any(MOMENTUM in kinds for kinds in self.stored)

    @property
    def kinds(self) -> list[str]:
        """The kinds that a result has."""
        usual = ("param", MOMENTUM) if self.by_muon else KINDS
        return [*dict.fromkeys(chain(usual if self.in_hf else (), *self.stored))]

    def job_of(self, kind: str, target: Layout) -> Job:
        """The job for the state of a kind. Where none is stored, weights are masters, moments zeros."""
        job, row = self.job, replace(self.job.row, gemm=False)
        reads = job.reads if kind == "param" else ()
        if any(kind in kinds for kinds in self.stored):
            reads = tuple(state_name(kind, name) for name in job.reads)
        own = job.writes[: len(row.hf) if target == "hf" else 1]
        writes = tuple(state_name(kind, name) for name in own)
        return Job(state_name(kind, job.name), row if kind == "param" else _of_moments(row), reads, writes)

    def lacking(self, kind: str) -> list[str]:
        """What is missing of the state of a kind."""
        lacking = [name for name, kinds in zip(self.job.reads, self.stored, strict=True) if kind not in kinds]
        is_own_master = kind == "param" and len(lacking) == len(self.stored)
        return [] if is_own_master or self._without_gradient else [state_name(kind, name) for name in lacking]

    @property
    def untrained(self) -> list[str]:
        """The tensors that a trainer with Hugging Face's names has no state of, though it should."""
        if not self.in_hf or self._without_gradient:
            return []
        return [name for name, kinds in zip(self.job.reads, self.stored, strict=True) if not kinds]

    @property
    def _without_gradient(self) -> bool:
        return self.job.row.layers == "indexed" and not any(self.stored)


def _of_moments(row: Row) -> Row:
    """A parameter's row for its moments, which do not change if 1 is subtracted from a weight."""
    moved = SAME if isinstance(row.rearrangement, Gamma) else row.rearrangement
    return replace(row, rearrangement=moved, as_stored=row.as_stored and _of_moments(row.as_stored))


def reading_masters(jobs: Iterable[Job], state: Mapping[str, TensorSpec]) -> list[Job]:
    """The jobs of a model whose weights are to be its FP32 masters, where an optimizer's `state` has any; copies are of
    weights."""
    read = []
    for job in jobs:
        masters = tuple(state_name("param", name) for name in job.reads)
        has_all = bool(masters) and all(name in state for name in masters)
        read.append(replace(job, reads=masters, copies=()) if has_all else job)
    return read
