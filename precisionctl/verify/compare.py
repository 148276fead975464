"""Two checkpoints compared in any two formats, tensor by tensor.

They meet under their Hugging Face names, where the padding of a vocabulary is no difference, and are read in pieces, so
memory does not grow with the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from precisionctl.architectures.param_map import Naming
from precisionctl.checkpoints.base import OfScalesBehind, Reader
from precisionctl.checkpoints.chunks import BytesProgress
from precisionctl.checkpoints.gguf.reader import GgufReader
from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings
from precisionctl.checkpoints.mlx.mlx_names import saved_by_mlx
from precisionctl.codes.statistics import decibels
from precisionctl.conversion.known_state import known_state
from precisionctl.errors import CheckpointError
from precisionctl.export.mlx_plan import mlx_has, names_as_codes
from precisionctl.export.weight_encodings import weight_encodings
from precisionctl.fp8.state import Fp8State, Fp8States
from precisionctl.model.same_model import differences, in_words
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.optimizer_jobs import OptimizerSource
from precisionctl.planning.plan import Plan
from precisionctl.processes import in_processes
from precisionctl.sizes import counted
from precisionctl.torch_when_used import one_torch_thread, torch
from precisionctl.verify.code_comparison import CodesComparison, codes_as_values, compare_codes
from precisionctl.verify.configs import Found, compare_configs
from precisionctl.verify.differences import Differences, comparable, differing
from precisionctl.verify.encodings import compare_encodings
from precisionctl.verify.fixed_scales import FixedScales, compare_fixed_scales
from precisionctl.verify.hf_tensors import HfTensors, StoredRows
from precisionctl.verify.losses import Losses
from precisionctl.verify.mmproj_towers import TowersOfBoth, mmproj_of, towers_of_both
from precisionctl.verify.not_compared import NotCompared, of_keys, of_weights
from precisionctl.verify.optimizers import both_optimizers

if TYPE_CHECKING:
    from torch import Tensor

Status = Literal["exact", "rounded", "encoded", "lost", "differs", "shape", "only in A", "only in B"]


@dataclass(frozen=True)
class TensorComparison:
    """One tensor. `rounded`: one side is exactly the other rounded to BF16, as mlx-lm's norms plus one are, too.
    `encoded`: one side is exactly the encoding of the other, under the scale stored with it, or as ggml (Q8_0 and Q4_0)
    or MLX encodes it. `lost`: it is that encoding, but its scales make no sense, so it does not represent the values
    (`verify/losses.py`).

    SQNR in dB (infinite without noise), the largest absolute error, and the number of values that differ (`differing`)
    compare B's values with A's; None if they cannot be subtracted. `remark` says what the codes have lost, if that is
    worth knowing.
    """

    name: str
    status: Status
    dtypes: str
    sqnr_db: float | None = None
    max_abs_error: float | None = None
    differing: int | None = None
    shapes: str = ""
    """Both shapes, if they differ."""
    remark: str = ""

    @property
    def equal(self) -> bool:
        return self.status in ("exact", "rounded", "encoded")


@dataclass(frozen=True)
class Comparison:
    """`settings` has a line for each setting with which the same weights give other logits, and for each fixed scale
    that differs. `fp8` has a line for each difference in FP8 state; None if state was not compared, because no side has
    any, or only one has. `codes` describes every weight that is FP8 codes on either side, if that was asked for.
    `not_compared` lists what was left out for these two."""

    tensors: tuple[TensorComparison, ...]
    settings: tuple[str, ...]
    fp8: tuple[str, ...] | None
    codes: tuple[CodesComparison, ...] = ()
    not_compared: tuple[NotCompared, ...] = ()

    @property
    def equal(self) -> bool:
        return all(tensor.equal for tensor in self.tensors) and not self.settings and not self.fp8

    def as_json(self) -> dict[str, Any]:
        return {"equal": self.equal} | asdict(self)


def compare(
    a: Reader,
    b: Reader,
    *,
    fp8: bool = False,
    state_file: Path | None = None,
    workers: int = 1,
    progress: BytesProgress = lambda total: nullcontext(lambda n: None),
) -> Comparison:
    """Compare every tensor of two checkpoints, and their FP8 state where both have one.

    With `fp8`, state is compared also where only one has any, and FP8 weights are compared code by code too. Fixed
    scales are held against the state in `state_file`, if that is given, filled in as a conversion does
    (`known_state`): it stands for what the side of values recorded, or A. `workers` is the number of processes; what
    is found does not depend on it. `progress` is opened for A's stored bytes. Raises MappingError where a checkpoint,
    or the state, does not fit its architecture; OutputError if a worker was killed.
    """
    plans = _plan(a, b), _plan(b, a)
    left, right = (_tensors(*each) for each in ((a, b, plans[0]), (b, a, plans[1])))
    encodings = weight_encodings(a), weight_encodings(b)
    for name, of in {**left.copies, **right.copies}.items():
        left.add_copy(name, of)
        right.add_copy(name, of)
    optimizers, not_both = both_optimizers(a, b)
    towers = towers_of_both(a, b, plans)
    of_a: list[HfTensors] = [left, *(mine for mine, _ in optimizers), *([towers.a] if towers else [])]
    with progress(sum(mine.nbytes(name) for mine in of_a for name in mine.specs)) as on_bytes:
        tensors = [*_compare_tensors(left, right, on_bytes, workers), *_compare_extras(left, right)]
        for mine, others in optimizers:
            found = _compare_tensors(mine, others, on_bytes, workers)  # no command rounds an optimizer
            tensors += [replace(each, status="differs") if each.status == "rounded" else each for each in found]
        if towers:
            tensors += _compare_tensors(towers.a, towers.b, on_bytes, workers)
            side: Status = "only in A" if towers.file == "A" else "only in B"
            tensors += [TensorComparison(name, side, dtype) for name, dtype in towers.others.items()]
    recorder = int(bool(a.encodings) and not b.encodings)  # of A and B
    state = known_state((a, b)[recorder], plans[recorder].gemms, state_file).current if state_file else None
    fixed = (
        FixedScales(reader, side.plan, coded, state or reader.fp8)
        for reader, side, coded in zip((a, b), (left, right), encodings, strict=True)
    )
    settings, of_settings = _compare_settings(a, b, encodings, fixed)
    both_states = [a.fp8, b.fp8]
    if state and both_states[1 - recorder]:
        both_states[recorder] = state
    states, of_states = _compare_states(*both_states, one_sided=fp8)
    before = (None if a.encodings else encodings[0], None if b.encodings else encodings[1])
    codes = tuple(compare_codes(left, right, before, workers)) if fp8 else ()
    derived = [name for plan in plans for name in plan.derived]
    left_out = (*of_settings, *_left_out(a, b, towers, derived), *not_both, *of_states)
    if fp8:
        left_out += tuple(of_weights("codes", codes_as_values(left, right)))
    settings = [*settings, *(towers.settings if towers else ())]
    return Comparison(tuple(tensors), tuple(settings), states, codes, left_out)


def _plan(reader: Reader, other: Reader) -> Plan:
    """The plan of all tensors of one side. Where one is mlx-lm's, matrices are as they are when they become codes, and
    the other has what mlx-lm has."""
    of_mlx, others_of_mlx = (saved_by_mlx(side.files) for side in (reader, other))
    naming: Naming = "text alone" if _without_towers(reader, other) else "as saved"
    codes = names_as_codes(reader.model) if of_mlx or others_of_mlx else ()
    plan = make_plan(reader, "hf", naming=naming, codes=codes)
    if not others_of_mlx:
        return plan
    jobs = tuple(filter(mlx_has, plan.jobs))
    return replace(plan, jobs=jobs, targets={name: plan.targets[name] for job in jobs for name in job.writes})


def _tensors(reader: Reader, other: Reader, plan: Plan) -> HfTensors:
    """The tensors of one side; of a wrapper with towers that are not compared those of its text model, as that calls
    them."""
    return HfTensors(reader, plan.text_alone if _without_towers(reader, other) else plan)


def _without_towers(reader: Reader, other: Reader) -> bool:
    """Whether a side has towers that are not compared, as the other one has no place for any."""
    return reader.model.wrapper is not None and (other.container == "gguf" or saved_by_mlx(other.files))


def _compare_settings(
    a: Reader,
    b: Reader,
    encodings: tuple[WeightEncodings | None, WeightEncodings | None],
    fixed: Iterable[FixedScales],
) -> Found:
    """Compare config.json, models, encodings and the fixed scales of both."""
    lines, left_out = compare_configs(a, b)
    of_models = [
        f"{field} is {in_words(mine)} in A, {in_words(others)} in B"
        for field, (mine, others) in differences(a.model, b.model).items()
    ]
    if of_models and a.model.model_type != b.model.model_type:  # the reason; two families may also compute alike
        lines = [f"the family is {a.model.model_type} in A, {b.model.model_type} in B", *lines]
    lines = [*lines, *of_models]
    for more, also_left_out in (compare_encodings(a, b, *encodings), compare_fixed_scales(*fixed)):
        lines, left_out = [*lines, *more], [*left_out, *also_left_out]
    return lines, left_out


def _compare_states(
    a: Fp8States | None, b: Fp8States | None, *, one_sided: bool
) -> tuple[tuple[str, ...] | None, list[NotCompared]]:
    """A line for each difference of FP8 state, None where nothing is compared, and what is left out; `one_sided` says
    that state which only one side has is a difference."""
    if a and b:
        return tuple(_state_differences(a, b)), of_keys("recording", _recorded_otherwise(a, b))
    if a is b:
        return None, []
    having, lacking = ("A", "B") if a else ("B", "A")
    if one_sided:
        return (f"no FP8 state in {lacking}",), []
    return None, [NotCompared("one state", f"only {having} has any")]


def _compare_tensors(
    a: HfTensors, b: HfTensors, on_bytes: Callable[[int], None], workers: int
) -> list[TensorComparison]:
    sizes = {name: a.nbytes(name) for name in (*a.specs, *b.specs)}
    found: dict[str, TensorComparison] = {}
    results = in_processes(lambda name: _compare_tensor(name, a, b), [*sizes], [*sizes.values()], workers)
    with closing(results):
        for name, tensor in results:
            found[name] = tensor
            on_bytes(sizes[name])
    return [found[name] for name in sizes]


def _compare_extras(a: HfTensors, b: HfTensors) -> Iterator[TensorComparison]:
    """Compare biases that Hugging Face has no place for. A missing one counts as zero."""
    left, right = a.extras(), b.extras()
    for name in dict.fromkeys((*left, *right)):
        if name in left and name in right:
            mine, others = (StoredRows.of(side[name].reshape(1, -1)) for side in (left, right))
            dtypes = " / ".join(dict.fromkeys((a.stored_dtype(name), b.stored_dtype(name))))
            if left[name].shape != right[name].shape:
                yield TensorComparison(name, "shape", dtypes)
            elif (status := _verdict(mine, others)) != "exact":
                yield _measured(name, status, dtypes, [(mine, others)])
        elif name not in right and bool(left[name].any()):
            yield TensorComparison(name, "only in A", a.stored_dtype(name))
        elif name not in left and bool(right[name].any()):
            yield TensorComparison(name, "only in B", b.stored_dtype(name))


def _left_out(a: Reader, b: Reader, towers: TowersOfBoth | None, derived: Sequence[str]) -> Iterator[NotCompared]:
    """What these two checkpoints have of the things that are never compared, and of the towers of one that were
    not."""
    readers = {"A": a, "B": b}
    yield from of_keys("derived", derived[:1])
    others = {"A": b, "B": a}
    alone = (name for name, reader in readers.items() if mmproj_of(reader) or _without_towers(reader, others[name]))
    yield from of_keys("towers", (f"of {name}" for name in alone) if towers is None else towers.unread)
    models = {name: reader.model for name, reader in readers.items() if saved_by_mlx(others[name].files)}
    ahead = (name for name, model in models.items() if model.mtp_num_layers or model.stores_unused)
    yield from of_keys("prediction", (f"of {name}" for name in ahead))
    behind = {name: len(reader.behind) for name, reader in readers.items() if isinstance(reader, OfScalesBehind)}
    yield from of_keys("scales of values", (f"{counted(n, 'scale')} of {name}" for name, n in behind.items() if n))
    padded = {
        name: reader.model.padded_vocab_size - reader.model.vocab_size
        for name, reader in readers.items()
        if reader.layout == "megatron"
    }
    yield from of_keys("padding", (f"{rows} in {name}" for name, rows in padded.items() if rows > 0))
    yield from of_keys("run", (f"of {name}" for name, reader in readers.items() if _has_run(reader)))
    files = [reader.companions.files for reader in readers.values()]
    named = [name for name in dict.fromkeys((*files[0], *files[1])) if name != "config.json"]
    inside = [f"the tokenizer in the file of {name}" for name, reader in readers.items() if reader.container == "gguf"]
    unequal = [name for name in named if all(files) and files[0].get(name) != files[1].get(name)]
    yield from of_keys("files", (*unequal, *inside))
    if isinstance(a, GgufReader) and isinstance(b, GgufReader):
        keys = (key for key in (*a.metadata, *b.metadata) if not key.startswith("tokenizer."))
        yield from of_keys("metadata", (key for key in keys if a.metadata.get(key) != b.metadata.get(key)))


def _has_run(reader: Reader) -> bool:
    """Whether a checkpoint is that of a run, with its step or an optimizer, also one that cannot be read."""
    try:
        return reader.iteration is not None or isinstance(reader, OptimizerSource) and bool(reader.optimizer_specs)
    except CheckpointError:
        return True


def _compare_tensor(name: str, a: HfTensors, b: HfTensors) -> TensorComparison:
    if name not in b.specs:
        return TensorComparison(name, "only in A", a.dtype(name))
    if name not in a.specs:
        return TensorComparison(name, "only in B", b.dtype(name))
    dtypes = " / ".join(dict.fromkeys((a.dtype(name), b.dtype(name))))
    if a.specs[name].shape != b.specs[name].shape:
        shapes = f"{list(a.specs[name].shape)} / {list(b.specs[name].shape)}"
        return TensorComparison(name, "shape", dtypes, shapes=shapes)
    if all(left.same_bytes(right) for left, right in _pieces(name, a, b)):  # which takes no PyTorch
        return TensorComparison(name, "exact", dtypes, math.inf, 0.0, 0)
    with one_torch_thread():
        return _compare_values(name, a, b, dtypes)


def _compare_values(name: str, a: HfTensors, b: HfTensors, dtypes: str) -> TensorComparison:
    verdicts = {_verdict(left, right) for left, right in _pieces(name, a, b)}
    worst: Status = next((status for status in _WORST_FIRST if status in verdicts), "exact")  # there may be no rows
    if worst == "exact":
        return TensorComparison(name, worst, dtypes, math.inf, 0.0, 0)
    if worst in ("differs", "rounded"):
        return _measured(name, worst, dtypes, _pieces(name, a, b))
    losses, error = _losses(name, a, b)
    return TensorComparison(name, "lost" if losses.why else worst, dtypes, *error, remark=losses.why or losses.remark)


def _measured(
    name: str, status: Status, dtypes: str, pieces: Iterable[tuple[StoredRows, StoredRows]]
) -> TensorComparison:
    found = Differences()
    for left, right in pieces:
        found.see(left, right)
    return TensorComparison(name, status, dtypes, found.sqnr_db, found.largest_error, found.differing)


_WORST_FIRST: tuple[Status, ...] = ("differs", "encoded", "rounded", "exact")


def _pieces(name: str, a: HfTensors, b: HfTensors) -> Iterator[tuple[StoredRows, StoredRows]]:
    together = max(side.rows_together(name) for side in (a, b))
    for row, rows in a.pieces(name, together):
        yield a.read(name, row, rows), b.read(name, row, rows)


def _losses(name: str, a: HfTensors, b: HfTensors) -> tuple[Losses, tuple[float, float, int]]:
    """The losses of the side that is codes against the other side's values; and SQNR, largest error and number of
    values that differ, as `Differences` has them."""
    coded = a if a.cast(name) or (a.is_codes(name) and not b.cast(name)) else b
    spec = a.specs[name]
    losses, row, signal = Losses(spec.rows, spec.columns, coded.block(name), coded.is_packed(name)), 0, 0.0
    count = 0
    for left, right in _pieces(name, a, b):
        codes, values = (left, right) if coded is a else (right, left)
        decoded = codes.values
        count += differing(*comparable(left, right))
        losses.see(row, codes.stored, values.values, decoded)
        signal += float(decoded.double().square().sum()) if coded is a else 0.0
        row += len(values.data)
    sqnr = decibels(signal if coded is a else losses.total.power, losses.total.error)
    return losses, (sqnr, losses.largest_error, count)


def _verdict(a: StoredRows, b: StoredRows) -> Status:
    if a.same_bytes(b):
        return "exact"
    if differing(*comparable(a, b)) == 0:
        return "exact"
    are_values = not (a.is_codes or b.is_codes)
    if are_values and (_is_rounding(a.stored, b.stored) or _is_rounding(b.stored, a.stored)):
        return "rounded"
    left, right = a.values, b.values
    one_is_codes = a.is_codes != b.is_codes or (a.cast is None) != (b.cast is None)  # of the other's, which may be FP8
    made = [side for side, values in ((a, right), (b, left)) if one_is_codes and side.encodes(values)]
    if not made:
        return "differs"
    return "encoded" if any(side.cast is None or side.cast.share_a_scale for side in made) else "rounded"


def _is_rounding(stored: Tensor, of: Tensor) -> bool:
    """Whether `stored`, in BF16, or beside FP64 in FP32, is exactly `of` rounded, and no value became infinite by
    rounding."""
    return (
        (stored.dtype == torch.bfloat16 or (stored.dtype, of.dtype) == (torch.float32, torch.float64))
        and of.is_floating_point()
        and torch.equal(stored.isfinite(), of.isfinite())
        and differing(stored.float(), of.to(stored.dtype).float()) == 0
    )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _state_differences(a: Fp8States, b: Fp8States) -> Iterator[str]:
    """A line for each difference; equal means equal to the last bit."""
    left, right = asdict(a.recipe), asdict(b.recipe)
    yield from (f"recipe: {key} is {left[key]} and {right[key]}" for key in left if left[key] != right[key])
    for name in sorted(a.modules.keys() ^ b.modules.keys()):
        yield f"{name}: only in {'A' if name in a.modules else 'B'}"
    for name in sorted(a.modules.keys() & b.modules.keys()):
        yield from _module_differences(name, a.modules[name], b.modules[name])
    for name in sorted(a.raw.keys() | b.raw.keys()):
        if name not in a.raw or name not in b.raw or not _same_bits(a.raw[name], b.raw[name]):
            yield f"{name}: payloads that were not understood differ"
    for name in sorted(a.statistics.keys() & b.statistics.keys()):
        measured, others = a.statistics[name], b.statistics[name]
        for role in sorted(measured.keys() & others.keys()):
            if measured[role].as_row() != others[role].as_row():
                yield f"{name} {role}: the statistics differ"


def _recorded_otherwise(a: Fp8States, b: Fp8States) -> Iterator[str]:
    yield from (word for word in ("producer", "iteration") if getattr(a, word) != getattr(b, word))
    one_sided = sum(len(a.statistics.get(name, {}).keys() ^ b.statistics.get(name, {}).keys()) for name in a.modules)
    if one_sided:
        yield f"{one_sided} statistics"


def _module_differences(name: str, a: Fp8State, b: Fp8State) -> Iterator[str]:
    for role in sorted(a.roles.keys() | b.roles.keys()):
        left, right = a.roles.get(role), b.roles.get(role)
        if left is None or right is None:
            yield f"{name} {role}: only in {'A' if right is None else 'B'}"
        elif not _same_bits(left.scale, right.scale):
            yield f"{name} {role}: scale is {left.scale.tolist()} and {right.scale.tolist()}"
        elif not _same_bits(left.amax_history, right.amax_history):
            yield f"{name} {role}: the amax histories differ"
