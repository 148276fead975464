"""What the commands do, as functions: `from precisionctl import api` (docs/library.md).

Names in `__all__`, their arguments and the fields of what they return are stable under semantic versioning; the rest of
the package is not. Errors are of the tree in `precisionctl.errors`, whose classes are stable too. Nothing is printed.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from precisionctl.calibration.calibrate import Calibrated, Calibration, calibrate
from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.chunks import read_values
from precisionctl.checkpoints.hf_directory.hub import HubName
from precisionctl.checkpoints.open import open_checkpoint as open_reader
from precisionctl.commands.hints import open_hinted
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.commands.target_rules import check_directory
from precisionctl.conversion.command import execute
from precisionctl.conversion.convert import OnBytes
from precisionctl.engines.rules.rule import Finding
from precisionctl.errors import PrecisionctlError
from precisionctl.evaluate.measure import Evaluation, evaluate as evaluate_reader
from precisionctl.fp8.grouped import ColumnOrder
from precisionctl.fp8.state import Fp8States
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import Layout, Parallelism
from precisionctl.paths import StrPath
from precisionctl.planning.plan import Plan
from precisionctl.readiness.assess import assess
from precisionctl.readiness.judge import Readiness
from precisionctl.recording.record import record, recorded_provider, recorder_callback
from precisionctl.recording.run_recorder import RunRecorder
from precisionctl.reports.inspect import describe
from precisionctl.verify.compare import Comparison, compare

__all__ = [
    "Calibrated",
    "Calibration",
    "Checkpoint",
    "Comparison",
    "Converted",
    "Evaluation",
    "Finding",
    "Parallelism",
    "PrecisionctlError",
    "Readiness",
    "Request",
    "RunRecorder",
    "calibrate",
    "check_target",
    "convert",
    "download",
    "evaluate",
    "inspect",
    "open_checkpoint",
    "plan",
    "readiness",
    "record",
    "recorded_provider",
    "recorder_callback",
    "verify",
]


@dataclass(frozen=True)
class Converted:
    """What `convert` has made. `notes` are what the command prints for its user; `nbytes` is the size of the result's
    tensors in bytes; `done_before` says that the same call was killed before, when the result was complete already."""

    path: Path
    nbytes: int
    notes: tuple[str, ...]
    done_before: bool


def plan(request: Request) -> Plan:
    """What a request will do, without writing anything: `plan(request).describe()` has every job and every tensor, and
    `.nbytes` the bytes of the result's tensors. Raises what `convert` raises before it writes."""
    return plan_command(request).plan


def convert(
    request: Request,
    *,
    workers: int = 2,
    restart: bool = False,
    verify: bool = False,
    on_bytes: OnBytes = lambda count: None,
) -> Converted:
    """Carry out a request of `convert` (`Request(source, destination, "hf" or "megatron", ...)`) or of
    `export-inference` (`Request.export(source, destination, "vllm", ...)`).

    The destination appears when it is complete. After a kill or an error the same call continues; `restart` discards
    what an unfinished one left. `verify` reads everything back and compares it with the source before that. `workers`
    are forked processes. `on_bytes` is called with the number of bytes that a finished job has written.

    Raises RecipeError for options that contradict each other, CheckpointError and MappingError for a source that cannot
    be read, PrecisionError for numbers that cannot be made, OutputError and DiskProblem for a destination that cannot
    be written.
    """
    command = plan_command(request)
    found = execute(command, workers=workers, restart=restart, verify=verify, on_bytes=on_bytes)
    notes = (*command.notes, *(found.notes if found else ()))
    return Converted(command.output.path, command.plan.nbytes, notes, done_before=found is None)


def verify(
    a: StrPath,
    b: StrPath,
    *,
    fp8: bool = False,
    fp8_state: StrPath | None = None,
    reference: StrPath | None = None,
    workers: int = 2,
    on_bytes: OnBytes = lambda count: None,
) -> Comparison:
    """Compare two checkpoints tensor by tensor, whatever their formats. `.equal` is the verdict, and `.tensors` has of
    each the status, SQNR in dB, largest absolute error, and number of values that differ.

    With `fp8`, codes are compared one by one, and FP8 state on one side only is a difference. `fp8_state` is a file of
    `calibrate`, with which fixed scales are compared. `reference` is a Hugging Face directory of the same model, as in
    a Request. `workers` are forked processes. Raises CheckpointError; MappingError for a checkpoint that does not fit
    its own architecture; RecipeError for a reference that contradicts one; OutputError if a worker was killed."""
    readers = (_opened(path, None, reference) for path in (a, b))
    file = Path(fp8_state) if fp8_state else None
    return compare(*readers, fp8=fp8, state_file=file, workers=workers, progress=lambda total: nullcontext(on_bytes))


def _opened(path: StrPath, iteration: int | None, reference: StrPath | None) -> Reader:
    return open_hinted(Path(path), iteration, reference=Path(reference) if reference else None)


def check_target(
    path: StrPath, target: str, ranks: int = 1, *, expert_parallel: bool = False, reference: StrPath | None = None
) -> list[Finding]:
    """The findings where an export breaks a rule of an engine, of `te`, `llama.cpp` or `mlx`; empty if every rule is
    kept.

    If a finding's `rule.fatal` is true, the engine refuses the directory or computes wrong results. The engine runs on
    `ranks` GPUs; with `expert_parallel` each gets whole experts. `reference` is as in a Request. Raises RecipeError for
    an unknown target, for others than engines on several GPUs, for `expert_parallel` on one, for codes that are not
    read or have no rules, and for a reference that contradicts the directory; UnknownFormat for anything but what the
    target reads: a Hugging Face directory, or for llama.cpp a GGUF file."""
    same_model = Path(reference) if reference else None
    found = check_directory(Path(path), target, ranks, expert_parallel=expert_parallel, reference=same_model)
    return [*found.findings]


def inspect(path: StrPath, iteration: int | None = None, *, reference: StrPath | None = None) -> Mapping[str, Any]:
    """What a checkpoint is, with the keys of `inspect --json` (docs/json.md). No matrix is read whole: where there is
    FP8 state, the rows that the digest of its weights samples are. `reference` is as in a Request. Raises
    CheckpointError, also for an `iteration` that is not there or not complete, and RecipeError as `verify`."""
    return describe(_opened(path, iteration, reference))


def readiness(
    path: StrPath,
    *,
    fp8_state: StrPath | None = None,
    workers: int = 2,
    iteration: int | None = None,
    reference: StrPath | None = None,
) -> Readiness:
    """Whether FP8 training is safe from a checkpoint, as `inspect --fp8` judges it: `.verdicts` by scaling, `.roles` by
    module and role, with shares from 0 to 1 (docs/switching.md has definitions, limits and their sources).

    Reads all weights, in `workers` processes. `fp8_state` is a file of `calibrate`, and `reference` as in a Request.
    Raises CheckpointError, MissingFp8State for a state file of another model, and RecipeError as `verify`."""
    state = Path(fp8_state) if fp8_state else None
    return assess(_opened(path, iteration, reference), state, lambda total: nullcontext(lambda count: None), workers)


def evaluate(
    path: StrPath,
    data: StrPath,
    *,
    against: StrPath | None = None,
    sequence_length: int = 1024,
    device: torch.device | str | None = None,
    iteration: int | None = None,
) -> Evaluation:
    """Perplexity and mean loss (nats) on text, whatever `resume` takes as data, computed in the precision that the
    checkpoint is stored in.

    The text is cut into rows of `sequence_length` targets, or of the model's maximum. With `against`, the BF16 source,
    also its perplexity, the KL divergence (nats per token) and the share of equal top-1 tokens (0 to 1). Without
    `device`, on a GPU if there is one. Raises CheckpointError; UnknownArchitecture for a model without a table;
    DataError for text or a tokenizer that cannot be used, and for a reference with another vocabulary."""
    reference = open_reader(Path(against)) if against else None
    reader = open_reader(Path(path), iteration)
    return evaluate_reader(reader, data, against=reference, sequence_length=sequence_length, device=device)


def download(name: str) -> Path:
    """The directory of a checkpoint on the Hugging Face Hub, `org/name` or `org/name@revision`: in the cache of its
    client, which downloads what is not there. A path that exists is returned as it is. Raises UnknownFormat for what is
    neither; CheckpointError for a repository that cannot be read or has no checkpoint; EnvironmentProblem if the Hub
    cannot be reached; RecipeError and DiskProblem as `HubName.download`."""
    found = HubName.read(name)
    return Path(name) if found is None else found.download(progress=False)


@dataclass(frozen=True)
class StoredAs:
    """A tensor's logical shape, `[out, in]` for a linear, and the dtype that is stored. For packed codes that is the
    dtype of their bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of an open checkpoint, by logical name: one for each layer and expert, without ranks or stages, in
    Hugging Face's or Megatron's names and shapes (`layout`).

    Values are decoded: codes are FP32, everything else has the dtype that it is stored in. A tensor is
    read when it is asked for, and none is kept.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    @property
    def layout(self) -> Layout:
        """`hf` or `megatron`."""
        return self._reader.layout

    @property
    def container(self) -> str:
        """The name of its format, e.g. `torch_dist`."""
        return self._reader.container

    @property
    def model(self) -> ModelShape:
        """The model's sizes and switches, in Megatron's words."""
        return self._reader.model

    @property
    def iteration(self) -> int | None:
        """The training step; None if there is none."""
        return self._reader.iteration

    @property
    def fp8(self) -> Fp8States | None:
        """The state of delayed scaling; None if there is none. `.modules[name].roles[role]` has `scale`, FP32 `[]`, the
        factor before the cast, and `amax_history`, FP32 `[amax_history_len]` (docs/scales.md); for experts,
        `[experts]` and `[experts, amax_history_len]`. Names are Megatron's."""
        return self._reader.fp8

    @cached_property
    def specs(self) -> Mapping[str, StoredAs]:
        """Shape, and dtype as stored, of every tensor."""
        return {name: StoredAs(spec.shape, spec.dtype.torch) for name, spec in self._reader.specs.items()}

    def rows(self, name: str, start: int, count: int) -> Tensor:
        """Rows `[start, start + count)` of a tensor, `[count, columns]`, decoded; a vector is one column. For tensors
        that are larger than memory. Raises KeyError for an unknown name, IndexError for rows that the tensor does not
        have, and DamagedCheckpoint for bytes that are not there."""
        spec = self._reader.specs[name]
        if not 0 <= start <= start + count <= spec.rows:
            raise IndexError(f"rows {start} to {start + count} of {spec.rows}")
        return read_values(self._reader, self._reader.encodings, name, start, count)

    def __getitem__(self, name: str) -> Tensor:
        spec = self._reader.specs[name]
        return self.rows(name, 0, spec.rows).reshape(spec.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.specs)

    def __len__(self) -> int:
        return len(self._reader.specs)


def open_checkpoint(
    path: StrPath,
    iteration: int | None = None,
    *,
    architecture: str | None = None,
    reference: StrPath | None = None,
    grouped_columns: ColumnOrder | None = None,
) -> Checkpoint:
    """Open a checkpoint of any format that is read, without reading tensor data. `architecture`, `reference` and
    `grouped_columns` are those of a Request. Raises UnknownFormat, DamagedCheckpoint, and RecipeError for hints that
    contradict the checkpoint or each other."""
    same_model = Path(reference) if reference else None
    return Checkpoint(
        open_hinted(
            Path(path), iteration, architecture=architecture, reference=same_model, grouped_columns=grouped_columns
        )
    )
