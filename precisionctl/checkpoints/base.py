"""Readers and Writers of checkpoints, the containers that recognise them, and the user's hints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

from precisionctl.checkpoints.chunks import Chunk, Chunked
from precisionctl.codes.elements import Cast, Packing
from precisionctl.codes.encoding import Encoding
from precisionctl.errors import CheckpointError
from precisionctl.fp8.grouped import ColumnOrder
from precisionctl.fp8.state import Fp8States
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import MOMENTUM, Layout, TensorSpec, state_name


class TensorSource(Chunked, Protocol):
    """The part of a Reader that gives tensors, codes among them."""

    @property
    def encodings(self) -> Mapping[str, Encoding]:
        """How the codes among `specs` decode, by tensor name."""
        ...


@dataclass(frozen=True)
class Companions:
    """Files that belong to a model but hold none of its tensors, as bytes by their path in its directory, with slashes:
    config.json, generation config, tokenizer, chat templates, licence. `code` are the Python files among them that
    `auto_map` names; `notes` tell the user of files that are not copied. `directory` is where they were read from."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    code: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    directory: Path = field(default=Path(), compare=False)

    @property
    def config_path(self) -> Path:
        """The config.json among them, for errors: it may be elsewhere than the weights."""
        return self.directory / "config.json"


class Reader(Protocol):
    """A checkpoint (or a live model) to read from. Opening one reads no tensor data but the few rows that prove an
    order of parameters or a bias of zeros."""

    @property
    def path(self) -> Path | None:
        """The checkpoint's directory, or its file where it is one; None for a live model."""
        ...

    @property
    def container(self) -> str:
        """Its name as `--container` and reports have it, e.g. `torch_dist`."""
        ...

    @property
    def layout(self) -> Layout:
        """Whose names and shapes the tensors have: Hugging Face's or Megatron's."""
        ...

    @property
    def model(self) -> ModelShape:
        """The model's sizes and switches. Raises CheckpointError where the checkpoint does not describe it."""
        ...

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Shape, dtype and sharding of every tensor of the model, by logical name."""
        ...

    @property
    def fp8(self) -> Fp8States | None:
        """The state of delayed scaling that is stored with the weights; None if there is none."""
        ...

    @property
    def encodings(self) -> Mapping[str, Encoding]:
        """How the codes among `specs` decode, by tensor name."""
        ...

    @property
    def companions(self) -> Companions:
        """The files beside the weights that belong to the model."""
        ...

    @property
    def own_companions(self) -> Companions:
        """The companion files of the checkpoint itself, if `companions` are a reference's."""
        ...

    @property
    def iteration(self) -> int | None:
        """The training step; None if there is none."""
        ...

    @property
    def files(self) -> Sequence[Path]:
        """Every file that holds tensor data; their sizes and times identify the source."""
        ...

    def chunks(self, name: str) -> Sequence[Chunk]:
        """Where a tensor's elements are; none if this process has no part of it."""
        ...


@runtime_checkable
class HasCasts(Protocol):
    """A Reader some of whose tensors may be values that are decoded as they are read, as in GGUF and in directories of
    Hugging Face's layout."""

    def cast(self, name: str) -> Cast | None:
        """How the codes are made that a tensor is decoded from; None where it is values, or that is not known here."""
        ...

    def decoded_from(self, name: str) -> str:
        """What a tensor is decoded from, in words; empty where it is values, or only its dtype is known."""
        ...


@runtime_checkable
class HasFormerCodes(Protocol):
    """A Reader of values, some of which are changed from codes that are still stored (an adapter merged into its
    base)."""

    @property
    def former_codes(self) -> Chunked:
        """The tensors from before the change, codes among them, by the same names."""
        ...


@runtime_checkable
class HasScalesBehind(Protocol):
    """A Reader that leaves out scales which say nothing of values: of inputs, outputs or a KV cache."""

    @property
    def behind(self) -> Collection[str]:
        """Their names."""
        ...


@runtime_checkable
class HasNotes(Protocol):
    """A Reader that gives something otherwise than it is stored, or does not give all that is stored."""

    def notes(self) -> Iterator[str]:
        """That, in sentences for the user."""
        ...


@runtime_checkable
class HasOptimizer(TensorSource, Protocol):
    """A Reader of which an optimizer's tensors are read, too: by the same `chunks`, under names of their own."""

    @property
    def optimizer_specs(self) -> Mapping[str, TensorSpec]:
        """As `specs`, of the optimizer's tensors (`optimizer.state.<kind>.<parameter>`); empty where there is none."""
        ...


def has_muon(reader: HasOptimizer) -> bool:
    """Whether matrices were trained by Muon, which keeps one momentum for each (`momentum_buffer`), in FP32."""
    return any(name.startswith(state_name(MOMENTUM, "")) for name in reader.optimizer_specs)


@dataclass(frozen=True)
class WithOptimizer:
    """A reader's model and optimizer as one source of tensors."""

    reader: HasOptimizer

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {**self.reader.specs, **self.reader.optimizer_specs}

    @property
    def encodings(self) -> Mapping[str, Encoding]:
        return self.reader.encodings

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self.reader.chunks(name)


TAKE_REFERENCE = "`convert`, `export-inference`, `resume`, `calibrate`, `verify`, `inspect` or `eval`"
"""The commands that have the option --reference, for advice that any command may give."""

WITH_REFERENCE = (
    f"Give {TAKE_REFERENCE} a Hugging Face directory of the same model with --reference: its config.json and tokenizer "
    "are enough. Other commands read what `convert --to megatron` makes with it."
)
"""Advice for a checkpoint that does not say its model."""


NO_WAY_BACK = "There is no way back to those codes."
"""The end of a note on codes that are decoded as they are read."""


@dataclass(frozen=True)
class Hints:
    """What the user says about a checkpoint that it does not say itself.

    `architecture` is the family (`model_type`) of a Megatron checkpoint without a config.json. `reference` is the
    directory that `--reference` names: the same model, or an adapter's base; `companions` are its companion files, and
    `towers` its towers if it is a wrapper; `trust_reference` says that its config.json overrules Megatron's arguments.
    `grouped_columns` is the order of columns in the FP8 state of grouped linears.
    """

    architecture: str | None = None
    companions: Companions | None = None
    grouped_columns: ColumnOrder | None = None
    reference: Path | None = None
    towers: Chunked | None = None
    trust_reference: bool = False


NO_HINTS = Hints()


@dataclass(frozen=True)
class Container:
    """How a container is recognised and opened: the `CONTAINER` of each module that reads one.

    `open` takes the path, the iteration that is wanted (None for the newest) and the user's hints; it refuses an
    iteration that is not there. `looked_for` says in words how it is recognised, for errors.
    """

    recognise: Callable[[Path], bool]
    open: Callable[[Path, int | None, Hints], Reader]
    looked_for: str


def without_iterations(open_only: Callable[[Path, Hints], Reader]) -> Callable[[Path, int | None, Hints], Reader]:
    """The `open` of a container that has one checkpoint in a directory."""

    def open_container(path: Path, iteration: int | None, hints: Hints) -> Reader:
        if iteration is not None:
            raise no_iterations(path)
        return open_only(path, hints)

    return open_container


def no_iterations(path: Path) -> CheckpointError:
    """The error for an iteration that is wanted of a checkpoint which has none to choose from."""
    do = "Leave --iteration out. If each step has a directory of its own, give that."
    return CheckpointError("it has no iterations to choose from", where=path, do=do)


class Writer(Protocol):
    """A checkpoint (or a live model) to write to."""

    @property
    def directory(self) -> Path:
        """The directory of the checkpoint's files, among them our own under `precisionctl/`."""
        ...

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Shape, dtype and sharding of every tensor that will be written, by logical name."""
        ...

    def lay_out(self) -> None:
        """Create every file that holds tensor data at its final size. Tensors in existing files are not changed."""
        ...

    def chunks(self, name: str) -> Sequence[Chunk]:
        """Where a tensor's elements are to be written."""
        ...

    def finish(self, fp8: Fp8States | None) -> None:
        """Write what is known only after all tensors: FP8 state, indexes, metadata."""
        ...


def packings_of(reader: Reader) -> dict[str, Packing]:
    """The weights that are stored as codes other than FP8, and how."""
    packings = {name: reader.specs[name].packing for name in reader.encodings}
    return {name: packing for name, packing in packings.items() if packing}
