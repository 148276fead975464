"""Notes for the user on a result: what it needs, what was computed anew, and where its scales come from."""

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from precisionctl.checkpoints.base import Reader, packings_of
from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings
from precisionctl.codes.four_bit_loss import GAUSSIAN_DB
from precisionctl.conversion.known_state import KnownState, origin, outdated_note
from precisionctl.dtypes import DType
from precisionctl.errors import shown
from precisionctl.export.input_scales import unreached_experts, why_too_small
from precisionctl.fp8.carry import StateChange
from precisionctl.fp8.extra_state_writer import TeVersion
from precisionctl.fp8.state import IN_USE, Fp8States
from precisionctl.param import Parallelism, is_slice
from precisionctl.planning.plan import Job, Plan
from precisionctl.precision import Precision
from precisionctl.quant_methods.base import FOUR_BITS, Scheme
from precisionctl.quant_methods.coded_weights import ngram_table
from precisionctl.sizes import counted, size


def lower_scheme_note(codes: str, scheme: str) -> str:
    """A note that codes of the source become values, where another scheme of the same target keeps them."""
    return f"The {codes} codes of this model are decoded; --scheme {scheme} keeps them as they are."


def tower_notes(plan: Plan) -> Iterator[str]:
    """A note that a wrapper's towers go to a Megatron checkpoint beside its text model, which Megatron alone reads."""
    if (wrapper := plan.model.wrapper) is None:
        return
    towers = plan.towers
    yield (
        f"Megatron has the text model of this {wrapper.model_type}; its towers, "
        f"{counted(len(towers.targets), 'tensor')}, {size(towers.nbytes)}, are kept beside it as they are. A "
        "checkpoint that Megatron saves later has none of them: give this one as its --reference on the way "
        "to Hugging Face."
    )


def stage_notes(sizes: Parallelism, layers: int) -> Iterator[str]:
    """A note on the flags for pipeline ranks with different numbers of layers, which Megatron does not take from a
    checkpoint's arguments."""
    counts = sizes.layers_of_ranks(layers)
    if len(set(counts)) == 1:
        return
    flags = {
        "decoder-first-pipeline-num-layers": sizes.first_layers,
        "decoder-last-pipeline-num-layers": sizes.last_layers,
        "num-virtual-stages-per-pipeline-rank": sizes.virtual if sizes.virtual > 1 else None,
    }
    words = " ".join(f"--{flag} {value}" for flag, value in flags.items() if value is not None)
    yield f"Pipeline ranks have {', '.join(map(str, counts))} layers: start Megatron with {words}."


GATE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
"""The environment variable without which Transformer Engine 2.16.1, 2.17.1 and 2.18 or later refuse delayed-scaling
state; it must be 1."""


def payload_notes(te: TeVersion, expert_ranks: int | None) -> Iterator[str]:
    """Notes on what Transformer Engine needs to load the FP8 payloads (`resume` needs nothing). `expert_ranks` is the
    number of expert-parallel ranks that experts' payloads are cut for."""
    if te == 1:
        yield (
            "The FP8 payloads are for Transformer Engine 0.6 to 1.14, and hold no recipe: start the run with the FP8 "
            "flags that are among the checkpoint's arguments."
        )
    else:
        yield (
            f"Transformer Engine 2.16.1, 2.17.1, 2.18 and later load FP8 payloads only where {GATE}=1 is set; "
            "`resume` does not need it."
        )
    if te == 2 and expert_ranks:
        yield (
            f"The experts' FP8 state is cut as Megatron cuts that of {counted(expert_ranks, 'expert rank')}: a run "
            "with another --expert-model-parallel-size mixes it up. Convert with its --ep."
        )


def state_notes(change: StateChange) -> Iterator[str]:
    """Notes on scales of weights that were computed from the weights instead of carried, and why."""
    if change.stale:
        yield (
            f"The recorded weight amax of {counted(len(change.stale), 'module')} does not fit the weights and "
            "is computed from them. The state of their inputs may be of other weights too: only an explicit "
            "--fp8-state uses it."
        )
    modules = change.states.modules
    waiting = [  # modules with other roles to record; weights do not count, as a weight of zeros never has a history
        name
        for name in change.from_weights
        if not all(modules[name].roles[role].recorded for role in IN_USE if role != "weight")
    ]
    if waiting:
        yield (
            f"Weight scales of {counted(len(waiting), 'module')} come from the weights; their activations and "
            "gradients have no history yet. `resume` fills them in warm-up passes before its first FP8 step."
        )


def code_notes(encodings: WeightEncodings) -> Iterator[str]:
    """Notes that weights which were codes are values now, and how to make them codes again."""
    formats = Counter(spec.codes_name for spec in encodings.weights.values())
    were = " and ".join(
        f"{counted(count, 'weight was', 'weights were')} {name} codes" for name, count in formats.items()
    )
    yield (
        f"{were}; the result has their decoded values. The scales are kept beside them: `convert --to hf "
        "--precision fp8` writes the same codes again."
    )
    names = {name for scales in encodings.scales.values() for name in scales.names}
    rest = {name: spec.shape for name, spec in encodings.stored.specs.items() if name not in names}
    if several := [name for name, shape in rest.items() if math.prod(shape) != 1]:
        yield (
            f"But not with {counted(len(several), 'scale')} of a KV cache that are no single number, "
            f"e.g. {shown(several[0])} {list(rest[several[0]])}: the way back to codes is refused for them."
        )


def format_notes(reference: Path | None, encodings: WeightEncodings) -> Iterator[str]:
    """A note on the format of a result's codes if it is the reference's, or the weights' own and not FP8."""
    others = sorted({spec.codes_name for spec in encodings.weights.values()} - {"FP8"})
    if reference and encodings.path == reference:
        yield f"The codes have the form of the reference's: {reference}."
    elif others:
        yield (
            f"Weights become {' and '.join(others)} again, as they were: `--precision fp8` writes codes in the "
            "format that they had."
        )


def decoded_notes(reader: Reader) -> Iterator[str]:
    """Notes that weights which were codes are values now, and stay values."""
    for name, count in Counter(packing.name for packing in packings_of(reader).values()).items():
        weights = counted(count, "weight was", "weights were")
        yield f"{weights} {name} codes, and are what they decode to. The scales stay behind."


def input_scale_notes(recorded: Fp8States | None, file: Path | None, *, file_is_noted: bool = False) -> Iterator[str]:
    """Notes on where an export's fixed input scales come from: `file` (that of --fp8-state; no note if `file_is_noted`,
    because `KnownState.notes` say it already), else the FP8 state `recorded`, else the fixed scales of the source's
    codes."""
    if file:
        yield from () if file_is_noted else (f"Input scales are those of {file}.",)
    elif recorded:
        yield f"Input scales are those of the checkpoint's FP8 state ({origin(recorded)})."
    else:
        yield "Input scales are the fixed ones of the source's weights."
    if recorded and (why := why_too_small(recorded)):
        yield f"They may be too small: {why}."


def unreached_notes(states: Fp8States | None, jobs: Sequence[Job]) -> Iterator[str]:
    """A note on experts whose inputs were never recorded."""
    if count := unreached_experts(states, jobs):
        inputs = counted(count, "input of an expert", "inputs of experts")
        yield f"{inputs} saw no token: the scale is of the largest amax of the layer's experts."


_NAMES = {DType.float32: "FP32", DType.float16: "FP16", DType.bfloat16: "BF16"}
_ROUNDED = {DType.bfloat16: (DType.float32, DType.float16), DType.float16: (DType.float32,)}
"""For each dtype of 16 bits those whose values are rounded to it."""


def rounded_notes(reader: Reader, plan: Plan) -> Iterator[str]:
    """Notes on values that are rounded to 16 bits though nobody asked for that, here or by who loads the result."""
    rounded = [
        name
        for job in plan.jobs
        if not _was_widened(job, reader, plan)
        for name in job.writes
        if _is_rounded(job, name, reader, plan)
    ]
    if rounded:
        dtype = plan.targets[rounded[0]].dtype
        yield (
            f"{counted(len(rounded), 'tensor that stays values is', 'tensors that stay values are')} "
            f"{' or '.join(_NAMES[was] for was in _ROUNDED[dtype])} in the source and {_NAMES[dtype]} in the "
            f"result, the first is {rounded[0]}."
        )
    half = [name for name, spec in plan.targets.items() if spec.dtype == DType.float16 and len(spec.shape) > 1]
    if half and plan.codes:
        yield (
            f"{counted(len(half), 'matrix that stays values is', 'matrices that stay values are')} FP16, as in the "
            "source; config.json says bfloat16, to which engines round as they load, unless told `--dtype float16`."
        )
    yield from narrowed_notes(reader, plan)


def narrowed_notes(reader: Reader, plan: Plan) -> Iterator[str]:
    """Notes on norms that only Megatron needs in FP32 (`Row.wide_beside`), and that are of 16 bits in the result."""
    shifted = [job for job in plan.jobs if _was_widened(job, reader, plan)]
    jobs = [job for job in shifted if plan.targets[job.writes[0]].dtype in _ROUNDED]
    of_fp32 = [job.writes[0] for job in jobs if _is_rounded(job, job.writes[0], reader, plan)]
    if of_fp32:
        yield (
            f"{counted(len(of_fp32), 'norm is', 'norms are')} FP32 in Megatron so that no bit is lost there, and of "
            "16 bits in the result, as the parameters beside them: exact, unless they were trained, or FP32 before "
            f"Megatron had them. The first is {of_fp32[0]}."
        )
    if others := [job.writes[0] for job in jobs if job.writes[0] not in of_fp32]:
        yield (
            f"{counted(len(others), 'norm is', 'norms are')} stored less 1 in Megatron, in 16 bits, and rounded to "
            f"16 bits in the result; FP32 would be exact. The first is {others[0]}."
        )


def joined_notes(reader: Reader, plan: Plan) -> Iterator[str]:
    """A note on tensors that become wider because they are merged with wider ones."""
    widened = []
    for job in plan.jobs:
        values = [name for name in job.reads if name in reader.specs and not reader.specs[name].is_codes]
        written = {plan.targets[name].dtype for name in job.writes}
        if len({reader.specs[name].dtype for name in values}) > 1 and len(written) == 1:
            widened += [name for name in values if reader.specs[name].dtype not in written]
    if widened:
        yield (
            f"{counted(len(widened), 'tensor becomes', 'tensors become')} FP32, as part of one tensor with others that "
            "need it: no value changes, but the way back does not give them their dtype again. The first is "
            f"{widened[0]}."
        )


def _was_widened(job: Job, reader: Reader, plan: Plan) -> bool:
    """Whether a job writes norms as Hugging Face has them that were less one in Megatron."""
    shifted = bool(job.row.wide_beside) and not job.row.moves_rows(plan.model)
    return shifted and reader.layout == "megatron" and plan.to_layout == "hf"


def _is_rounded(job: Job, name: str, reader: Reader, plan: Plan) -> bool:
    """Whether a tensor that a job writes has 16 bits of other values, which had more or others."""
    read = {reader.specs[each].dtype for each in job.reads if each in reader.specs}
    return not read.isdisjoint(_ROUNDED.get(plan.targets[name].dtype, ()))


def known_state_notes(known: KnownState, *, carried: bool) -> Iterator[str]:
    """Notes on what was replaced of the checkpoint's own FP8 state, and on state that is outdated and therefore only
    `carried` along or left behind."""
    yield from known.notes
    if known.outdated:
        what = "it is carried in the sidecar and used for nothing" if carried else "it stays behind"
        yield outdated_note(known.outdated, what)


def four_bit_notes(
    scheme: Scheme, encodings: WeightEncodings | None, plan: Plan, source: Path, destination: Path
) -> Iterator[str]:
    """Before an export in four bits: what rounding costs weights that are values, and who measures it."""
    name = FOUR_BITS.get(scheme)
    rounded = [weight for weight in plan.codes if encodings is None or weight not in encodings.weights]
    if name and rounded:
        usual = next(decibels for other, decibels in GAUSSIAN_DB.items() if FOUR_BITS[other] == name)
        from_path, to_path = shlex.quote(str(source)), shlex.quote(str(destination))
        yield (
            f"{counted(len(rounded), 'weight is', 'weights are')} rounded to {name}: Gaussian ones keep {usual} dB of "
            f"signal over rounding (FP8 keeps 31), those with outliers less. "
            f"`precisionctl inspect {from_path} --fp8` says beforehand what each kind loses, "
            f"`precisionctl eval {to_path} --data FILE --against {from_path}` what it costs the model."
        )


def uncoded_tower_notes(plan: Plan) -> Iterator[str]:
    """The note on a wrapper's towers, of an encoded plan in which they stay values."""
    if plan.model.wrapper and not (towers := plan.towers).codes:
        yield f"The towers stay values: {counted(len(towers.targets), 'tensor')}, {size(towers.nbytes)}."


def in_bf16_notes(
    reader: Reader, plan: Plan, precision: Precision, scheme: Scheme, refused: Mapping[str, str]
) -> Iterator[str]:
    """Notes on weights that are BF16 in an export although `precision` puts them in FP8: experts that a family stores
    as one tensor, and weights that an engine has `refused` (name -> reason)."""
    jobs = [job for job in plan.jobs if job.row.gemm and is_slice(job.writes[0]) and precision.in_fp8(job.module)]
    if jobs:
        were_codes = any(name in reader.encodings for job in jobs for name in job.reads)
        yield (
            f"Experts {'become' if were_codes else 'stay in'} BF16: {plan.model.architecture} stores those of a layer "
            f"as one tensor, and no engine reads codes of that in scheme {scheme}."
        )
    if tables := [name for job in plan.jobs for name in job.reads if name in reader.encodings and ngram_table(name)]:
        yield (
            f"The codes of {counted(len(tables), 'part')} of tables of n-grams become BF16: no scheme has their form, "
            "and `convert --to hf --precision fp8` keeps it."
        )
    if refused:
        name, what = next(iter(refused.items()))
        yield (
            f"Weights that stay in BF16 for their shapes, or for those of what is computed with them: {len(refused)}. "
            f"The first is {name}: {what}."
        )
