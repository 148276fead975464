"""make_plan: the way from one checkpoint to another, from names, shapes and dtypes alone."""

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import reduce
from itertools import cycle
from pathlib import Path
from typing import Protocol

from precisionctl.architectures.families import table_of
from precisionctl.architectures.param_map import OF_TRAINERS, Alias, Naming, Place, Row, filled, names
from precisionctl.architectures.read_off import TensorRow
from precisionctl.architectures.wrappers import TOWERS
from precisionctl.dtypes import DType
from precisionctl.errors import DROP_OPTIMIZER, MappingError, MissingTensor, at
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.param import (
    ONE_RANK,
    REPLICATED,
    Layout,
    Parallel,
    Parallelism,
    TensorSpec,
    kind_and_parameter,
    shared_spec,
    state_name,
)
from precisionctl.planning import checks
from precisionctl.planning.optimizer_jobs import OptimizerSource, optimizer_jobs, reading_masters
from precisionctl.planning.plan import Job, Plan
from precisionctl.planning.segments import keeps_tensors
from precisionctl.sizes import counted


class PlanSource(Protocol):
    """The part of a Reader that planning needs."""

    @property
    def path(self) -> Path | None: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def model(self) -> ModelShape: ...
    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...


def make_plan(
    source: PlanSource,
    target: Layout,
    *,
    dtype: DType | None = None,
    parallelism: Parallelism = ONE_RANK,
    optimizer: bool = False,
    masters: bool = False,
    naming: Naming = "as stored",
    named_as_codes: Collection[str] = (),
) -> Plan:
    """Plan the way from `source` to a checkpoint of layout `target`.

    `dtype` is that of all target tensors, except rows that keep their stored one (`Row.keeps_dtype`) or are wider in
    Megatron (`Row.wide_beside`). None keeps the stored dtype, with FP8 codes decoded to BF16; in Megatron's layout that
    is the one that holds all that is merged. With `optimizer`, the state of the source's optimizer goes along: in FP32,
    or as it is stored if both sides are Megatron's. With `masters`, weights are made of its FP32 masters, where it has
    any.

    `naming` chooses names of the target, where there is a choice, and `named_as_codes` are weights that are to have the
    names that they have as codes. What is named as trainers have it (`OF_TRAINERS`) also has copies of tied tensors,
    and with `optimizer` no masters beside the weights, but as weights.

    Raises UnknownArchitecture, UnmappedTensor, MissingTensor, ShapeMismatch, MappingError or PrecisionError.
    """
    with at(source.path or ""):
        checks.check_text(source.specs)
        architecture = table_of(source.model)
        if target == "megatron":
            checks.check_megatron_has(source.model)
        rows = architecture.spelled(_hf_specs(source), source.model, naming, named_as_codes)
        if target == "hf" and source.model.wrapper and not any(isinstance(row, TensorRow) for row in rows):
            raise MissingTensor(
                f"the towers of this `{source.model.wrapper.model_type}` are not beside its text model",
                do="Give the directory that has them with --reference.",
            )
        model = stored = _as_stored(source, rows)
        if target == "megatron":
            model = stored.padded(parallelism.tensor)
            parallelism = checks.with_stages(parallelism, model.num_layers)
            checks.check_ranks(model, parallelism)
        patterns = [pattern.replace("{layer}", "*") for pattern in architecture.derived if source.layout == "hf"]
        derived = (
            *(name for name in source.specs if any(fnmatchcase(name, pattern) for pattern in patterns)),
            # transformers makes and saves an MLP of 0 shared experts
            *(name for name, spec in source.specs.items() if ".shared_experts." in name and 0 in spec.shape),
        )
        by_row = {row: _row_jobs(row, architecture.aliases, model, source, target, naming) for row in rows}
        jobs = [job for row_jobs in by_row.values() for job in row_jobs]
        _check_consumed(jobs, derived, source)

        # masters are read in the place of weights, or carried beside them with the rest of the optimizer, or neither
        run = source if (optimizer or masters) and isinstance(source, OptimizerSource) else None
        specs = {**source.specs, **(run.optimizer_specs if run else {})}
        read_as_weights = run.optimizer_specs if run and (masters or naming in OF_TRAINERS) else {}
        if read_as_weights:
            by_row = {row: reading_masters(row_jobs, read_as_weights) for row, row_jobs in by_row.items()}

        targets: dict[str, TensorSpec] = {}
        for row, row_jobs in by_row.items():
            if not row_jobs:
                continue
            _check_stored(row, row_jobs, specs, row.source.shapes(stored, source.layout))
            checks.check_division(row, model, parallelism)
            shapes, parallel = row.shapes(model, target), row.cut(model) if target == "megatron" else REPLICATED
            for job in row_jobs:
                dtypes = _dtypes_of(job, dtype, model, source.layout, target, specs, read_as_weights)
                targets |= _targets(job, shapes, parallel, dtypes)
        written = tuple(job for row_jobs in by_row.values() for job in row_jobs)
        plan = Plan(model, source.layout, target, written, targets, derived, parallelism)
        if run is None or not optimizer:
            return plan
        return _with_optimizer(plan, jobs, run, specs, stored, masters_beside=naming not in OF_TRAINERS)


def plan_weights(source: PlanSource) -> Plan:
    """The plan by which weights are measured and their digest is taken: to Megatron's layout, or to Hugging Face's for
    a model without a table, which has no other. Raises the errors of make_plan."""
    return make_plan(source, "hf" if isinstance(source.model, UntabledModel) else "megatron")


def stored_model(source: PlanSource) -> ModelShape:
    """The source's model as its tensors show it (`_as_stored`)."""
    return _as_stored(source, table_of(source.model).spelled(_hf_specs(source), source.model))


def _hf_specs(source: PlanSource) -> Mapping[str, TensorSpec]:
    """The source's tensors that have Hugging Face's names: all of a Hugging Face directory; of a Megatron checkpoint, a
    wrapper's towers."""
    if source.layout == "hf":
        return source.specs
    return {name.removeprefix(TOWERS): spec for name, spec in source.specs.items() if name.startswith(TOWERS)}


def _as_stored(source: PlanSource, rows: Iterable[Row]) -> ModelShape:
    """The source's model, corrected by the tensors that it stores. Without tensors of them it has no multi-token
    prediction layers, whatever its config says, and with tensors that nothing reads it `stores_unused`: transformers
    drops both. Megatron-Bridge drops output layers of prediction layers. If a family's files may lack `expert_bias`,
    and no layer has one, the model has none in Hugging Face."""

    def any_stored(some: Iterable[Row], place: Place) -> bool:
        return any(name in source.specs for row in some for name in names(row, source.layout, place))

    model = source.model
    of_mtp = [row for row in rows if row.of_prediction and not row.of_experts]
    if of_mtp:  # of a model without a table no number of layers is known
        first = {"mtp": 0, "mtp_layer": model.num_layers}
        if not any_stored(of_mtp, first):
            model = dataclasses.replace(model, mtp_num_layers=0, mtp_dense=False)
        if not any_stored((row for row in of_mtp if row.present.hf == "mtp_output_layers"), first):
            model = dataclasses.replace(model, mtp_output_layers=False)
    places = [(row, next(row.places(model), None)) for row in rows]
    if any(row.unused and place is not None and any_stored([row], place) for row, place in places):
        model = dataclasses.replace(model, stores_unused=True)
    biases = [(row, place) for row, place in places if row.present.hf == "hf_expert_bias" and place is not None]
    if source.layout == "hf" and biases and not any(any_stored([row], place) for row, place in biases):
        model = dataclasses.replace(model, hf_expert_bias=False)
    return model


def _row_jobs(
    row: Row, aliases: Iterable[Alias], model: ModelShape, source: PlanSource, target: Layout, naming: Naming
) -> list[Job]:
    """The jobs of one row, at each of its places."""
    here, there = row.present.in_layout(source.layout, model), row.present.in_layout(target, model)
    if not here and not there:
        return []
    if row.count(model) > len(source.specs):  # before a loop over as many as a config may claim
        raise MissingTensor(
            f"{row.count(model)} of `{row.megatron}`, but only {len(source.specs)} tensors", do="Is a shard missing?"
        )
    own = _aliases_of(row.source.hf, [alias for alias in aliases if model.has(alias.switch)])
    read = [name for name in _copies(own, model) if name in source.specs] if source.layout == "hf" else []
    written = _copies((one for one in own if one.written or naming in OF_TRAINERS), model) if target == "hf" else ()
    jobs = []
    for place in row.places(model):
        reads = names(row.source, source.layout, place) if here else ()
        writes = names(row, target, place) if there else ()
        copies = tuple(read)
        if copies and reads[0] not in source.specs:  # savers that leave out copies may leave out the original
            reads, copies = (copies[0], *reads[1:]), copies[1:]
        jobs.append(Job(names(row, "megatron", place)[0], row, reads, (*writes, *written), copies))
    return jobs


def _aliases_of(names: Collection[str], aliases: Sequence[Alias]) -> list[Alias]:
    """The aliases of these tensors, and of what is an alias itself: a prediction layer's output layer is a copy of the
    model's, which may be one of the embedding."""
    found = [alias for alias in aliases if alias.of in names]
    return [*found, *_aliases_of({alias.hf for alias in found}, aliases)] if found else []


def _copies(aliases: Iterable[Alias], model: ModelShape) -> tuple[str, ...]:
    """The names of the aliases in this model, one for each prediction layer where they are of these."""
    return tuple(
        filled(alias.hf, {"mtp_layer": model.num_layers + mtp})
        for alias in aliases
        for mtp in range(model.mtp_num_layers if "{mtp_layer}" in alias.hf else 1)
    )


_FIRST_NUMBER = re.compile(r"(\D+\.)(\d{1,9})\.")


def _check_consumed(jobs: Iterable[Job], derived: tuple[str, ...], source: PlanSource) -> None:
    """Raise MissingTensor or UnmappedTensor unless every tensor of the source is read by one job, or derived."""
    uses = Counter(name for job in jobs for name in (*job.reads, *job.copies))
    uses.update([name for name in derived if not uses[name]])
    missing = [name for name in uses if name not in source.specs]
    unexpected = [name for name in source.specs if not uses[name]]
    if missing:
        checks.check_names(missing, unexpected, "Is a shard missing, or does the config describe another model?")
    if unexpected:
        config = "config.json" if source.layout == "hf" else "Megatron's arguments"
        do = (
            f"Nothing is dropped in silence: is the model of {config} another one, or a part of this one? Only "
            "if the family itself has such tensors, its table under precisionctl/architectures/tables/ lacks a row."
        )
        last: dict[str, int] = {}  # the number of the last layer that the table has, by what is before it in names
        for layers, number in filter(None, map(_layer, uses)):
            last[layers] = max(number, last.get(layers, 0))
        of_layers = filter(None, map(_layer, unexpected))
        if later := [layers for layers, number in of_layers if number > last.get(layers, number)]:
            says = counted(last[later[0]] + 1, f"layer `{later[0]}*`", f"layers `{later[0]}*`")
            are = counted(len(later), "tensor is", "tensors are")
            do = (
                f"Nothing is dropped in silence: by {config} there are {says}, and {are} of later ones. Is that "
                "another model, or too few layers of this one?"
            )
        checks.check_names(missing, unexpected, do)
    assert all(count == 1 for count in uses.values()), "a table names a tensor twice"


def _layer(name: str) -> tuple[str, int] | None:
    """What a name has before its first number, which is that of a layer, and the number; None without one."""
    match = _FIRST_NUMBER.match(name)
    return match and (match[1], int(match[2]))


def _check_stored(
    row: Row, jobs: Iterable[Job], specs: Mapping[str, TensorSpec], shapes: tuple[tuple[int, ...], ...]
) -> None:
    """Raise PrecisionError or ShapeMismatch if what the jobs of a row read has not its dtypes, or not these shapes."""
    for job in jobs:
        read = {name: specs[name] for name in (*job.reads, *job.copies)}
        checks.check_dtypes({} if isinstance(row, TensorRow) else read, integers=bool(row.integers_below))
        checks.check_shapes(read, (*shapes[: len(job.reads)], *shapes[:1] * len(job.copies)))


def _with_optimizer(
    plan: Plan,
    jobs: Iterable[Job],
    run: OptimizerSource,
    specs: Mapping[str, TensorSpec],
    stored: ModelShape,
    *,
    masters_beside: bool,
) -> Plan:
    """The plan with the optimizer's state of the parameters that `jobs` read, and with `masters_beside` their masters.
    It is FP32, except that Megatron's stays as it is in Megatron's. `specs` are all of the source, which is the model
    `stored`. Raises as `optimizer_jobs`, and ShapeMismatch."""
    to_hf = plan.to_layout == "hf"
    placed = [job for job in jobs if to_hf or not isinstance(job.row, TensorRow)]  # Megatron trains no towers
    unplaced = {name for job in jobs for name in job.reads} - {name for job in placed for name in job.reads}
    if trained_towers := [name for name in run.optimizer_specs if kind_and_parameter(name)[1] in unplaced]:
        what = f"`{trained_towers[0]}` is the state of a tower, and Megatron has moments of the text model alone"
        raise MappingError(what, do=DROP_OPTIMIZER)
    of_parameters = optimizer_jobs(placed, run, plan.to_layout, masters=masters_beside)
    targets = dict(plan.targets)
    for job in of_parameters:  # tensors as large as their parameters, which may be padded otherwise than stored
        shapes = job.row.source.shapes(stored, plan.from_layout)
        checks.check_shapes({name: specs[name] for name in job.reads}, shapes[: len(job.reads)])
        dtype = specs[job.reads[0]].dtype if plan.from_layout == plan.to_layout == "megatron" else DType.float32
        parallel = REPLICATED if to_hf else job.row.cut(plan.model)
        for name, shape in zip(job.writes, job.row.shapes(plan.model, plan.to_layout), strict=False):
            targets[name] = shared_spec(shape, dtype, parallel)
    return dataclasses.replace(plan, jobs=(*plan.jobs, *of_parameters), targets=targets)


def _targets(
    job: Job, shapes: Sequence[tuple[int, ...]], parallel: Parallel, dtypes: Sequence[DType]
) -> dict[str, TensorSpec]:
    """What a job writes, in one dtype or in one for each tensor; copies of its first one are like that."""
    own = [*zip(shapes, dtypes if len(dtypes) > 1 else cycle(dtypes), strict=False)]
    copies = own[:1] * (len(job.writes) - len(own))
    each = zip(job.writes, [*own, *copies], strict=False)
    return {name: shared_spec(shape, dtype, parallel) for name, (shape, dtype) in each}


def _dtypes_of(
    job: Job,
    asked: DType | None,
    model: ModelShape,
    source: Layout,
    target: Layout,
    specs: Mapping[str, TensorSpec],
    read_as_weights: Mapping[str, TensorSpec],
) -> Sequence[DType]:
    """The dtype of all that a job writes, or one for each tensor: the one `asked` for, except of rows that keep theirs
    or are wider in Megatron. FP8 codes are taken for BF16, and weights for their masters if these are among what is
    `read_as_weights`."""

    def of_values(spec: TensorSpec) -> DType:
        return DType.bfloat16 if spec.is_codes else spec.dtype

    row = job.row
    dtype = None if row.keeps_dtype or row.integers_below else asked
    if row.wide_beside and not row.moves_rows(model):  # a norm that is less one in Megatron
        if target == "megatron":
            # 1 less than a number of 16 bits needs FP32, and nobody asks for its bits to be lost
            dtype = DType.float32 if source == "hf" or dtype == DType.float32 else None
        elif dtype is None and source == "megatron":
            if specs[job.reads[0]].dtype != DType.float32:
                return [DType.float32]  # which 1 more than a number of 16 bits needs, too
            # the one that holds those beside it, as they are read themselves or by their masters
            names_beside = [f"{job.name.rsplit('.', 2)[0]}.{name}" for name in row.wide_beside]
            beside = [read_as_weights.get(state_name("param", name)) or specs[name] for name in names_beside]
            return [reduce(DType.promoted, map(of_values, beside))]
    if dtype:
        return [dtype]

    # each tensor's own, or where tensors are merged or split the one that holds all of them
    dtypes = [of_values(specs[name]) for name in job.reads]
    if keeps_tensors(row, source, target):
        return dtypes
    return [reduce(DType.promoted, dtypes)] if dtypes else [DType.bfloat16]
