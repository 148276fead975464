"""Two checkpoints compared in any two formats. They meet under their Hugging Face names, where the padding of a
vocabulary is no difference."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from precisionctl.architectures.param_map import Naming
from precisionctl.checkpoints.base import HasScalesBehind, Reader
from precisionctl.checkpoints.chunks import BytesProgress
from precisionctl.checkpoints.gguf.reader import GgufReader
from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings
from precisionctl.checkpoints.mlx.mlx_names import saved_by_mlx
from precisionctl.conversion.known_state import known_state
from precisionctl.errors import CheckpointError
from precisionctl.export.mlx_plan import mlx_has, names_as_codes
from precisionctl.export.weight_encodings import weight_encodings
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Fp8States
from precisionctl.model.same_model import differences, in_words
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Plan
from precisionctl.sizes import counted
from precisionctl.untrusted.safe_files import has_file
from precisionctl.verify.code_comparison import CodesComparison, codes_as_values, compare_codes
from precisionctl.verify.configs import Found, compare_configs
from precisionctl.verify.encodings import compare_encodings
from precisionctl.verify.engine_rules import CheckableDirectory
from precisionctl.verify.fixed_scales import FixedScales, compare_fixed_scales
from precisionctl.verify.hf_tensors import HfTensors
from precisionctl.verify.mmproj_towers import TowersOfBoth, mmproj_of, towers_of_both
from precisionctl.verify.not_compared import NotCompared, of_keys
from precisionctl.verify.optimizers import both_optimizers, compare_optimizer_settings, optimizer_specs
from precisionctl.verify.state_comparison import compare_states
from precisionctl.verify.tensor_comparison import DIFFERS, Status, TensorComparison, compare_extras, compare_tensors


@dataclass(frozen=True)
class Comparison:
    """`settings` has a line for each setting with which the same weights give other logits, and for each fixed scale
    that differs. `fp8` has a line for each difference in FP8 state; None if state was not compared, because no side has
    any, or only one has. `codes` describes every weight that is FP8 codes on either side, if that was asked for.
    `optimizer` has a line for each setting of the optimizer that differs. `not_compared` lists what was left out for
    these two."""

    tensors: tuple[TensorComparison, ...]
    settings: tuple[str, ...]
    fp8: tuple[str, ...] | None
    codes: tuple[CodesComparison, ...] = ()
    optimizer: tuple[str, ...] = ()
    not_compared: tuple[NotCompared, ...] = ()

    @property
    def equal(self) -> bool:
        return all(tensor.equal for tensor in self.tensors) and not (self.settings or self.optimizer or self.fp8)

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
    left, right = _side(a, b), _side(b, a)
    recorder, other = (right, left) if left.is_codes and not right.is_codes else (left, right)
    state = known_state(recorder.reader, recorder.plan.gemms, state_file).current if state_file else None
    optimizers, not_both = both_optimizers(a, b)
    towers = towers_of_both(a, b, (left.plan, right.plan))
    tensors = _compare_tensors(left.tensors, right.tensors, optimizers, towers, workers, progress)
    settings, of_settings = _compare_settings(left, right, state)
    given = state if other.reader.fp8 else None
    both_states = (given if given and side is recorder else side.reader.fp8 for side in (left, right))
    one_live = _has_live_state(a) != _has_live_state(b)
    states, of_states = compare_states(*both_states, one_sided=fp8, of_weights=not one_live)
    codes = compare_codes(left.tensors, right.tensors, (left.former, right.former), workers) if fp8 else ()
    of_optimizers, also_not = compare_optimizer_settings(a, b) if optimizers else ([], [])
    derived = (*left.plan.derived, *right.plan.derived)
    unknown = _differing_in_ggufs_codes({"A": left, "B": right}, tensors)
    left_out = (*of_settings, *unknown, *_left_out(a, b, towers, derived), *not_both, *also_not, *of_states)
    if fp8 and (decoded := codes_as_values(left.tensors, right.tensors)):
        left_out = (*left_out, NotCompared("codes", f"{counted(len(decoded), 'weight')}, such as {decoded[0]}"))
    settings = [*settings, *(towers.settings if towers else ())]
    return Comparison(tuple(tensors), tuple(settings), states, tuple(codes), tuple(of_optimizers), left_out)


def _has_live_state(reader: Reader) -> bool:
    """Whether it is an export for Transformer Engine."""
    return isinstance(reader, CheckableDirectory) and has_file(reader.path / sidecar.LIVE, reader.path)


@dataclass(frozen=True)
class _Side:
    """One of the checkpoints. `plan` leads to Hugging Face's names, `tensors` are those that are compared, and
    `encodings` is how its weights are encoded, or once were."""

    reader: Reader
    plan: Plan
    tensors: HfTensors
    encodings: WeightEncodings | None

    @property
    def is_codes(self) -> bool:
        return bool(self.reader.encodings)

    @property
    def former(self) -> WeightEncodings | None:
        """How weights that are values now were encoded."""
        return None if self.is_codes else self.encodings

    def fixed_scales(self, state: Fp8States | None) -> FixedScales:
        return FixedScales(self.reader, self.tensors.plan, self.encodings, state or self.reader.fp8)


def _side(reader: Reader, other: Reader) -> _Side:
    """One side of a comparison with another checkpoint. Where one is mlx-lm's, matrices are as they are when they
    become codes, and the other has what mlx-lm has. Of a wrapper with towers that are not compared, tensors are those
    of its text model, as that calls them."""
    of_mlx, others_of_mlx = (saved_by_mlx(side.files) for side in (reader, other))
    without_towers = _without_towers(reader, other)
    naming: Naming = "text alone" if without_towers else "as saved"
    as_codes = names_as_codes(reader.model) if of_mlx or others_of_mlx else ()
    plan = make_plan(reader, "hf", naming=naming, named_as_codes=as_codes)
    if others_of_mlx:
        plan = plan.of_jobs(partial(mlx_has, model=plan.model))
    tensors = HfTensors(reader, plan.text_alone if without_towers else plan)
    return _Side(reader, plan, tensors, weight_encodings(reader))


def _compare_tensors(
    left: HfTensors,
    right: HfTensors,
    optimizers: Sequence[tuple[HfTensors, HfTensors]],
    towers: TowersOfBoth | None,
    workers: int,
    progress: BytesProgress,
) -> list[TensorComparison]:
    """Compare the tensors of both models, with copies that either side has, of their optimizers, and of their
    towers."""
    for name, of in {**left.copies, **right.copies}.items():
        left.add_copy(name, of)
        right.add_copy(name, of)
    of_a = [left, *(mine for mine, _ in optimizers), *([towers.a] if towers else [])]
    with progress(sum(mine.nbytes(name) for mine in of_a for name in mine.specs)) as on_bytes:
        tensors = [*compare_tensors(left, right, on_bytes, workers), *compare_extras(left, right)]
        for mine, others in optimizers:
            found = compare_tensors(mine, others, on_bytes, workers)  # no command rounds an optimizer
            tensors += [replace(each, status="differs") if each.status == "rounded" else each for each in found]
        if towers:
            tensors += compare_tensors(towers.a, towers.b, on_bytes, workers)
            side: Status = "only in A" if towers.file == "A" else "only in B"
            tensors += [TensorComparison(name, side, dtype) for name, dtype in towers.others.items()]
    return tensors


def _without_towers(reader: Reader, other: Reader) -> bool:
    """Whether a side has towers that are not compared, as the other one has no place for any."""
    return reader.model.wrapper is not None and (other.container == "gguf" or saved_by_mlx(other.files))


def _compare_settings(left: _Side, right: _Side, state: Fp8States | None) -> Found:
    """Compare config.json, models, encodings and the fixed scales of both, these against `state`, if there is one."""
    a, b = left.reader, right.reader
    lines, left_out = compare_configs(a, b)
    of_models = [
        f"{field} is {in_words(mine)} in A, {in_words(others)} in B"
        for field, (mine, others) in differences(a.model, b.model).items()
    ]
    if of_models and a.model.model_type != b.model.model_type:  # the reason; two families may also compute alike
        lines = [f"the family is {a.model.model_type} in A, {b.model.model_type} in B", *lines]
    lines = [*lines, *of_models]
    of_encodings = compare_encodings(a, b, left.encodings, right.encodings)
    of_scales = compare_fixed_scales(left.fixed_scales(state), right.fixed_scales(state))
    for more, also_left_out in (of_encodings, of_scales):
        lines, left_out = [*lines, *more], [*left_out, *also_left_out]
    return lines, left_out


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
    behind = {name: len(reader.behind) for name, reader in readers.items() if isinstance(reader, HasScalesBehind)}
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


def _differing_in_ggufs_codes(sides: Mapping[str, _Side], tensors: Sequence[TensorComparison]) -> list[NotCompared]:
    """The types of GGUF's codes of tensors that differ."""
    differing, found = [tensor.name for tensor in tensors if tensor.status in DIFFERS], list[str]()
    for letter, side in sides.items():
        if isinstance(side.reader, GgufReader):
            there = {
                word for name in differing if name in side.tensors.specs for word in side.tensors.dtype(name).split()
            }
            found += [f"{form} of {letter}" for form in side.reader.coded if form in there]
    return of_keys("encodings of GGUF", found)


def _has_run(reader: Reader) -> bool:
    """Whether a checkpoint is that of a run, with its step or an optimizer, also one that cannot be read."""
    try:
        return reader.iteration is not None or bool(optimizer_specs(reader))
    except CheckpointError:
        return True
