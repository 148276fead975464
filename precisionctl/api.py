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
from precisionctl.checkpoints.hub import HubName
from precisionctl.checkpoints.open import open_checkpoint as open_reader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request, StrPath
from precisionctl.commands.source import open_hinted
from precisionctl.commands.target_rules import check_target as check_reader
from precisionctl.conversion.command import execute
from precisionctl.conversion.convert import OnBytes
from precisionctl.engines.rule import Finding
from precisionctl.errors import PrecisionctlError
from precisionctl.evaluate.measure import Evaluation
from precisionctl.evaluate.measure import evaluate as evaluate_reader
from precisionctl.fp8 import sidecar
from precisionctl.fp8.grouped import ColumnOrder
from precisionctl.fp8.state import Fp8States
from precisionctl.model_shape import ModelShape
from precisionctl.param import Layout
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
    tensors; `done_before` says that the same request had been carried out already, and nothing was left to do."""

    path: Path
    nbytes: int
    notes: tuple[str, ...]
    done_before: bool


def plan(request: Request) -> Plan:
    """What a request will do, without writing anything: `plan(request).describe()` has every job and every tensor.
    Raises what `convert` raises before it writes."""
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
    are processes; with several, a script needs `if __name__ == "__main__":`.

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
    on_bytes: OnBytes = lambda count: None,
) -> Comparison:
    """Compare two checkpoints tensor by tensor, whatever their formats; `.equal` is the verdict. With `fp8` codes are
    compared one by one, and state on one side only is a difference; `fp8_state` is a file of `calibrate` that fixed
    scales are held against, and `reference` says of either what it does not say itself, as in a Request. Raises
    CheckpointError, MappingError for one that does not fit its own architecture, and RecipeError for a reference that
    contradicts one."""
    same_model = Path(reference) if reference else None
    readers = (open_hinted(Path(path), None, None, same_model, None) for path in (a, b))
    state = sidecar.read(Path(fp8_state)) if fp8_state else None
    return compare(*readers, fp8=fp8, state=state, progress=lambda total: nullcontext(on_bytes))


def check_target(path: StrPath, target: str, ranks: int = 1, *, expert_parallel: bool = False) -> list[Finding]:
    """The rules of an engine (or of `te`) that an exported directory breaks, served on `ranks` GPUs, which get experts
    whole if `expert_parallel`; those whose `rule.fatal` is true keep it from being loaded, or from being read rightly.
    Raises RecipeError for an unknown target, `te` on several GPUs or experts on one, and UnknownFormat for what is no
    Hugging Face directory."""
    return [*check_reader(open_reader(Path(path)), target, ranks, expert_parallel=expert_parallel).findings]


def inspect(path: StrPath, iteration: int | None = None) -> Mapping[str, Any]:
    """What a checkpoint is, as `inspect --json` prints it, without reading tensor data. Raises CheckpointError."""
    return describe(open_reader(Path(path), iteration))


def readiness(
    path: StrPath, *, fp8_state: StrPath | None = None, workers: int = 2, iteration: int | None = None
) -> Readiness:
    """Whether FP8 training is safe from a checkpoint, by layer, role and scaling, as `inspect --fp8` judges it. Reads
    all weights. Raises CheckpointError, and MissingFp8State for a state file of another model."""
    state = Path(fp8_state) if fp8_state else None
    return assess(open_reader(Path(path), iteration), state, lambda total: nullcontext(lambda count: None), workers)


def evaluate(
    path: StrPath,
    data: StrPath,
    *,
    against: StrPath | None = None,
    sequence_length: int = 1024,
    device: torch.device | str | None = None,
    iteration: int | None = None,
) -> Evaluation:
    """Perplexity on text (whatever `resume` takes as data), in the precision that a checkpoint is stored in; beside
    that of a BF16 reference, with the KL divergence in nats. Without `device`, on a GPU if there is one. Raises
    DataError for text or a tokenizer that cannot be used."""
    reference = open_reader(Path(against)) if against else None
    reader = open_reader(Path(path), iteration)
    return evaluate_reader(reader, data, against=reference, sequence_length=sequence_length, device=device)


def download(name: str) -> Path:
    """The directory of a checkpoint on the Hugging Face Hub, `org/name` or `org/name@revision`: in the cache of its
    client, which downloads what is not there. A path that exists is itself. Raises UnknownFormat for what is neither,
    and as `HubName.download`."""
    found = HubName.read(name)
    return Path(name) if found is None else found.download(progress=False)


@dataclass(frozen=True)
class StoredAs:
    """A tensor's logical shape, and the dtype of what is stored; of packed codes, that of their bytes."""

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
        """The state of delayed scaling (amax histories, scales) by Megatron's modules; None if there is none."""
        return self._reader.fp8

    @cached_property
    def specs(self) -> Mapping[str, StoredAs]:
        """Shape, and dtype as stored, of every tensor."""
        return {name: StoredAs(spec.shape, spec.dtype.torch) for name, spec in self._reader.specs.items()}

    def rows(self, name: str, start: int, count: int) -> Tensor:
        """Rows `[start, start + count)` of a tensor, `[count, columns]`; a vector is one column. For tensors that are
        larger than memory. Raises KeyError, and DamagedCheckpoint for bytes that are not there."""
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
    contradict the checkpoint."""
    same_model = Path(reference) if reference else None
    return Checkpoint(open_hinted(Path(path), iteration, architecture, same_model, grouped_columns))
