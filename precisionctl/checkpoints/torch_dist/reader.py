"""Read Megatron's `torch_dist` checkpoints with PyTorch alone.

The directory of an iteration holds a PyTorch distributed checkpoint (`.metadata`, `*.distcp`), `common.pt` with
arguments, counters and schedule (since megatron-core 0.19 the object `common_state` instead), and `metadata.json`,
written last. `torch_dist/writer.py` is the inverse.
"""

import argparse
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from precisionctl.architectures.families import from_hf_config
from precisionctl.architectures.towers_in_bridge import is_tower
from precisionctl.architectures.wrappers import TOWERS, is_wrapper
from precisionctl.checkpoints.adapter import bridge
from precisionctl.checkpoints.base import NO_HINTS, WITH_REFERENCE, Container, Hints, Reader
from precisionctl.checkpoints.chunks import Chunk, Chunked, chunk_files
from precisionctl.checkpoints.megatron.bridge_text import check_unused, unused_notes
from precisionctl.checkpoints.megatron.bridge_towers import BridgeTowers
from precisionctl.checkpoints.megatron.directory import MegatronReader, config_of
from precisionctl.checkpoints.megatron.keys import (
    COMMON,
    COMMON_OBJECT,
    EXTRA_STATE,
    MARKER,
    another_iteration,
    find_iteration,
    iteration_of,
    object_name,
)
from precisionctl.checkpoints.megatron.logical import (
    is_beside_towers,
    logical_tensors,
    model_prefix,
    of_optimizer,
    without_prefix,
)
from precisionctl.checkpoints.megatron.parameter_order import EVERY_KIND, Modules
from precisionctl.checkpoints.megatron.payloads import SavedPayload, payload_bytes
from precisionctl.checkpoints.megatron.provider import (
    BRIDGE,
    bridge_section,
    described_args,
    described_sharing,
    described_towers,
)
from precisionctl.checkpoints.megatron.towers import with_towers
from precisionctl.checkpoints.other_trainers.trainer_trees import MEGATRON_TREES, ROLLS_OPTIMIZER, step_of
from precisionctl.checkpoints.torch_dist.buckets import is_bucket, unpack_buckets
from precisionctl.checkpoints.torch_files import dcp_metadata, torch_zip
from precisionctl.checkpoints.torch_files.dcp_tensors import LogicalTensor, LogicalTensors
from precisionctl.codes.encoding import Encoding
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import NOT_TRAINED, TensorSpec, kind_and_parameter
from precisionctl.sizes import counted
from precisionctl.untrusted.safe_files import check_link, has_file, leads_out, read_file
from precisionctl.untrusted.safe_json import parse_json

INNER = {tree.model: tree.optimizer for tree in MEGATRON_TREES if tree.model}
"""Subdirectories that hold the checkpoint, and those of optimizers that are apart."""

_COMMON_KEYS = ("args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far")


def recognise(path: Path) -> bool:
    """Whether `path` is the directory of an iteration, or one of its entries is."""
    markers = (path / MARKER, *path.glob(f"*/{MARKER}"), *(path / name / MARKER for name in INNER))
    return any(_is_torch_dist(marker, path) for marker in markers)


def _is_torch_dist(marker: Path, path: Path) -> bool:
    if leads_out(marker.parent, path):  # nothing there is read; opening it says so
        inside = marker.parent.relative_to(path).as_posix()
        return inside in INNER or bool(re.fullmatch(r"release|iter_\d+", inside))
    try:
        data = read_file(marker, marker.parent)
    except (OSError, DamagedCheckpoint):
        return False
    try:
        return parse_json(data, marker).get("sharded_backend") == "torch_dist"
    except DamagedCheckpoint:
        if not (marker.parent / dcp_metadata.FILE).is_file():
            return False
        raise


def _is_complete(directory: Path) -> bool:
    """Whether a directory has what a save writes last: PyTorch's index, and then Megatron's marker."""
    return all((directory / name).is_file() for name in (dcp_metadata.FILE, MARKER))


class TorchDistReader(MegatronReader):
    """A Megatron `torch_dist` checkpoint: the directory of an iteration, or one of several (`iteration`, else the
    newest); also in the directories of NeMo 2 and verl.

    `specs` are the model's tensors and `optimizer_specs` the optimizer's (`optimizer.state.exp_avg.<parameter>` if it
    is stored by parameter); `chunks` serves both. Opening reads `.metadata`, the headers of towers, and the arguments
    if the optimizer is in buckets.

    Raises DamagedCheckpoint where files, boxes or sizes contradict each other, UnsafePickle for a pickle that asks for
    anything but Megatron's and PyTorch's classes.
    """

    container = "torch_dist"
    encodings: Mapping[str, Encoding] = {}

    complete = staticmethod(_is_complete)

    def __init__(
        self, path: Path, iteration: int | None = None, hints: Hints = NO_HINTS, index: dcp_metadata.Index | None = None
    ) -> None:
        """`index` is what `path` holds, for a subclass that has read it; else it is looked for and read."""
        self.path, self.hints = path, hints
        self._optimizer_beside: Path | None = None
        self._gemma_4: ModelShape | None = None
        """The model of config.json, if tensors of a Gemma 4 of Megatron-Bridge's were read by it."""
        self._sharing: Mapping[str, object] = {}
        """What Bridge's own description says of its keys and values."""
        if index is None:
            self.path, self._optimizer_beside, index = _find(path, iteration, self.complete)
        self._index = index
        self._empty: bytes | None = None
        self._prefix = model_prefix(self._index.tensors)
        tensors = logical_tensors(self._index.tensors, self.path, self._read_gemma_4)
        self._stored = LogicalTensors(self._with_buckets(tensors))
        specs = self._stored.specs
        trained = self._trained_towers
        text = {name: spec for name, spec in specs.items() if not of_optimizer(name) and name not in trained}
        self.specs = with_towers(text, self.towers, self.path)
        # Runs of this project once kept copies of what nothing trains, for which no other format has a place
        states = {name: spec for name, spec in specs.items() if of_optimizer(name) and not name.endswith(NOT_TRAINED)}
        self._of_optimizer = {name: one for name, one in states.items() if kind_and_parameter(name)[1] not in trained}
        self._towers_optimizer = states.keys() - self._of_optimizer.keys()

    def _read_gemma_4(self) -> ModelShape | None:
        """The model of config.json, if there is one: called for tensors of a Gemma 4 of Bridge's, which do not tell all
        of it. `notes` says later what config.json alone said. Raises as `check_unused`, but where the reference is
        trusted."""
        if not (config := config_of(self.companions)):
            return None
        self._gemma_4 = from_hf_config(config, self.companions.config_path)
        if not self.hints.trust_reference:
            self._sharing = described_sharing(self._bridge or {})
            check_unused(self._gemma_4, self._sharing, self.path)
        return self._gemma_4

    def _with_own(self, beside: Chunked) -> Chunked:
        """Bridge's towers, of a wrapper that it trained."""
        if not is_beside_towers(self._prefix):
            return beside
        config, tower = config_of(self.companions), next(filter(is_tower, self._stored.specs), "")
        if not is_wrapper(config):
            if not tower:
                return beside
            raise UnknownArchitecture(
                f"`{tower}` is part of a wrapper that Megatron-Bridge trained, and "
                + ("config.json is of a text model" if config else "no config.json says of which"),
                where=self.path,
                do=WITH_REFERENCE,
            )
        towers = BridgeTowers(self._stored, config, beside, self.path)
        if towers.own:
            towers.check(described_towers(self._bridge or {}))
            return towers
        if tower:
            what = f"`{tower}` is not known as part of a `{config['model_type']}`, of which config.json is"
            raise UnknownArchitecture(what, where=self.path, do="Is config.json this model's?")
        return beside

    def notes(self) -> Iterator[str]:
        # An optimizer that is not read is a pickled object for each rank (`dp_zero_gather_scatter`)
        if not self._of_optimizer and any(key.split("/")[0].endswith(".param_state") for key in self.objects):
            yield "The optimizer stays behind: it is stored by rank, in a form that newer Megatrons do not write."
        if self._towers_optimizer:
            tensors = counted(len(self._towers_optimizer), "tensor")
            yield f"What trained the towers stays behind: {tensors} of the optimizer."
        if payloads := sum(1 for _ in self._payloads(of_towers=True)):
            yield f"FP8 state of the towers stays behind: {counted(payloads, 'module')}."
        if self._gemma_4:
            yield from unused_notes(self._gemma_4, self._sharing)
        if isinstance(self.towers, BridgeTowers) and (lacking := self.towers.lacking):
            yield (
                f"The run had no module for {counted(len(lacking), 'tensor')} of the reference's towers: they are the "
                f"reference's, e.g. {lacking[0].removeprefix(TOWERS)}."
            )

    @property
    def optimizer_specs(self) -> Mapping[str, TensorSpec]:
        return self._of_optimizer

    @property
    def in_buckets(self) -> bool:
        """Whether the optimizer's tensors are flat buckets."""
        return any(is_bucket(key) for key in self._index.tensors)

    def _with_buckets(self, tensors: dict[str, LogicalTensor]) -> dict[str, LogicalTensor]:
        """Replace an optimizer's flat buckets by one tensor per parameter; unchanged if they fit no known order."""
        if not self.in_buckets:
            return tensors
        likely = Modules(self.args.get("transformer_impl") != "local", bool(self.args.get("moe_grouped_gemm", True)))
        # Frozen towers have no part of the buckets; those that were trained have, in no known order: nothing fits then
        model = {name: tensor for name, tensor in tensors.items() if not of_optimizer(name) and not is_tower(name)}
        found = unpack_buckets(self._index.tensors, model, sorted(EVERY_KIND, key=lambda kind: kind != likely))
        kept = {name: tensor for name, tensor in tensors.items() if name in model or not is_bucket(name)}
        return tensors if found is None else kept | found

    @property
    def files(self) -> Sequence[Path]:
        return sorted(self._stored.files | chunk_files(self.towers, self.towers.specs))

    def chunks(self, name: str) -> Sequence[Chunk]:
        return (self.towers if name in self.towers.specs else self._stored).chunks(name)

    @cached_property
    def common(self) -> Mapping[str, Any]:
        if has_file(self.path / COMMON, self.path):
            beside = self._optimizer_beside
            of_run = _read_common(beside) if beside else {}
            if beside and beside.name == ROLLS_OPTIMIZER:  # of the optimizer alone
                of_run = {"optimizer": of_run}
            return {**of_run, **_read_common(self.path)}
        if COMMON_OBJECT in self._index.objects:
            value = self.read_object(COMMON_OBJECT)
        else:  # each has a key of its own in PyTorch's checkpoints
            plain = {key: span for key, span in self._index.objects.items() if key in _COMMON_KEYS}
            value = {key: torch_zip.load(span.read(), span) for key, span in plain.items()}
            if not value and self.container == "torch_dist":
                raise DamagedCheckpoint(
                    f"no {COMMON}, nor its content as an object: it has Megatron's arguments, counters and schedule",
                    where=self.path,
                    do="Copy the checkpoint again.",
                )
        return _as_common(value, self.path)

    @property
    def objects(self) -> Sequence[str]:
        return list(self._index.objects)

    def read_object(self, key: str) -> Any:
        if key not in self._index.objects:
            raise DamagedCheckpoint(f"no object {key}", where=self.path)
        span = self._index.objects[key]
        return _only(torch_zip.load(span.read(), span), key, span)

    def checked_object(self, key: str) -> torch_zip.Span:
        self.read_object(key)
        return self._index.objects[key]

    @cached_property
    def _bridge(self) -> Mapping[str, Any] | None:
        """The `model` section of Bridge's description beside the checkpoint; None if there is none."""
        return bridge_section(self.path, "model") if has_file(self.path / BRIDGE, self.path) else None

    @cached_property
    def args(self) -> Mapping[str, Any]:
        """Megatron's arguments, as saved or from a description by Bridge or NeMo; empty if there are none."""
        args = self.common.get("args")
        return vars(args) if isinstance(args, argparse.Namespace) else described_args(self.path, self._bridge)

    @property
    def iteration(self) -> int | None:
        own = iteration_of(self.path, self.common)
        return own if own or (step := step_of(self.path)) is None else step  # NeMo-RL's own are 0, ROLL's are none

    @property
    def expert_ranks(self) -> int | None:
        grouped = self.args.get("moe_grouped_gemm") is True
        ranks = self.args.get("expert_model_parallel_size")
        return ranks if grouped and type(ranks) is int and ranks > 0 else None

    def payloads(self) -> Iterator[SavedPayload]:
        """Each `_extra_state` of the text model's that is not empty."""
        return self._payloads(of_towers=False)

    @property
    def _trained_towers(self) -> Collection[str]:
        """The stored tensors that are Bridge's towers."""
        return self.towers.own if isinstance(self.towers, BridgeTowers) else ()

    def _payloads(self, *, of_towers: bool) -> Iterator[SavedPayload]:
        """Each `_extra_state` that is not empty, of the modules of towers or of all others."""
        modules = tuple({f"{name.partition('.')[0]}." for name in self._trained_towers})
        for key, span in self._index.objects.items():
            name = object_name(without_prefix(self._prefix, key)) or ""
            if EXTRA_STATE not in name or name.startswith(modules) != of_towers:
                continue
            archive = span.read()
            if archive == self._empty:  # as that of an empty one before
                continue
            found = _only(torch_zip.skeleton_at(span), key, span)
            if isinstance(found, torch_zip.LocatedTensor):  # most are one, for whose bytes no PyTorch is needed
                begin = found.offset - span.offset
                data = archive[begin : begin + found.nbytes]
            else:
                data = payload_bytes(self.read_object(key), key)
            if data:
                yield SavedPayload(name, data, str(self.path))
            else:
                self._empty = archive


def _read_common(directory: Path) -> Mapping[str, Any]:
    path = directory / COMMON
    return _as_common(torch_zip.load(read_file(path, directory), path), path)


def _as_common(value: object, where: Path) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DamagedCheckpoint("the common data is not a dict", where=where)
    return value


def _find(
    path: Path, iteration: int | None, complete: Callable[[Path], bool]
) -> tuple[Path, Path | None, dcp_metadata.Index]:
    """The directory of the iteration that is wanted, that of the optimizer, where it is beside the model, and what
    both hold."""
    inner = [name for name in INNER if iteration is None and complete(path / name)]
    top = path / inner[0] if inner else path
    check_link(top, path)
    marked = iteration is None and _is_torch_dist(top / MARKER, top)  # perhaps without its index, which is told then
    found = top if marked else find_iteration(top, iteration, complete)
    try:
        index = dcp_metadata.read_index(found)
    except DamagedCheckpoint as error:
        another = another_iteration(top, complete, found.name) if found != top else ""
        raise type(error)(error.what, where=error.where, do=f"{error.do} {another}".strip()) from error
    apart = INNER[inner[0]] if inner else None
    if apart is None or not complete(beside := path / apart):
        return found, None, index
    check_link(beside, path)
    of_run = dcp_metadata.read_index(beside)
    if twice := index.tensors.keys() & of_run.tensors.keys():
        raise DamagedCheckpoint(f"`{min(twice)}` is there twice", where=beside)
    both = dcp_metadata.Index({**index.tensors, **of_run.tensors}, {**of_run.objects, **index.objects})
    return found, beside, both


def _only(value: Any, key: str, where: torch_zip.Span) -> Any:
    """An object without the list that Megatron wraps each in."""
    if not isinstance(value, list) or len(value) != 1:
        raise DamagedCheckpoint(f"{key} is not a list of one object", where=where)
    return value[0]


def _open(path: Path, iteration: int | None, hints: Hints) -> Reader:
    """A Megatron checkpoint; or adapters of Megatron-Bridge alone, merged with the base that the user names."""
    reader = TorchDistReader(path, iteration, hints)
    return bridge.with_base(reader, hints) if bridge.has_adapters(reader.specs) else reader


CONTAINER = Container(
    recognise,
    _open,
    f"{MARKER} of a Megatron torch_dist checkpoint, there or in the directory of an iteration",
)
