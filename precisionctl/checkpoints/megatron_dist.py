"""Read Megatron's `torch_dist` checkpoints with PyTorch alone.

The directory of an iteration holds a distributed checkpoint of PyTorch's (`.metadata`, `*.distcp`), `common.pt`
with all that is no tensor (since megatron-core 0.19 the object `common_state` instead), and `metadata.json`,
written last. `megatron_dist_writer.py` is the inverse.
"""

import argparse
import dataclasses
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from precisionctl.checkpoints import dcp, torch_zip
from precisionctl.checkpoints.base import Box, Chunk, Companions, Container
from precisionctl.checkpoints.companions import parse_json, read_companions
from precisionctl.checkpoints.megatron_keys import (
    COMMON,
    COMMON_OBJECT,
    COMPANIONS,
    EXTRA_STATE,
    MARKER,
    OURS,
    find_iteration,
    is_stacked,
    object_name,
    unstack,
)
from precisionctl.errors import DamagedCheckpoint, NotUnderstood
from precisionctl.fp8 import extra_state, sidecar
from precisionctl.fp8.encoding import Encoding
from precisionctl.fp8.state import DelayedScaling, Fp8State, Fp8States
from precisionctl.model_shape import ModelShape, from_hf_config, from_megatron_args
from precisionctl.param import Layout, TensorSpec

_EMBEDDING = "embedding.word_embeddings.weight"
_OPTIMIZER = ("optimizer.", "chained_")


def recognise(path: Path) -> bool:
    """Whether `path` is the directory of an iteration, or one of its entries is."""
    return any(_is_torch_dist(marker) for marker in (path / MARKER, *path.glob(f"*/{MARKER}")))


def _is_torch_dist(marker: Path) -> bool:
    try:
        content = json.loads(marker.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("sharded_backend") == "torch_dist"


@dataclass(frozen=True)
class _Part:
    """A box of a logical tensor: `start` elements into a stored piece."""

    box: Box
    piece: dcp.Piece
    start: int


class TorchDistReader:
    """An iteration, or the newest of a directory.

    `specs` are the model's tensors and `optimizer_specs` the optimizer's (`optimizer.state.exp_avg.<parameter>`
    where it is stored by parameter); `chunks` serves both. Opening reads `.metadata` alone.

    Raises DamagedCheckpoint where files, boxes or sizes contradict each other, and UnsafePickle.
    """

    container = "torch_dist"
    layout: Layout = "megatron"
    encodings: Mapping[str, Encoding] = {}

    def __init__(self, path: Path, iteration: int | None = None) -> None:
        self.path: Path = find_iteration(path, iteration)
        self._index = dcp.read_index(self.path)
        self._chunks: dict[str, tuple[Chunk, ...]] = {}
        self._parts: dict[str, list[_Part]] = {}
        self.specs: dict[str, TensorSpec] = {}
        self.optimizer_specs: dict[str, TensorSpec] = {}
        for key, stored in self._index.tensors.items():
            specs = self.optimizer_specs if key.startswith(_OPTIMIZER) else self.specs
            for name, spec, parts in _logical(key, stored, self.path):
                specs[name], self._parts[name] = spec, parts

    @property
    def files(self) -> Sequence[Path]:
        return sorted({part.piece.span.path for parts in self._parts.values() for part in parts})

    def chunks(self, name: str) -> Sequence[Chunk]:
        if name not in self._chunks:
            spec = self.specs.get(name) or self.optimizer_specs[name]
            self._chunks[name] = tuple(_chunk(name, spec, part) for part in self._parts[name])
        return self._chunks[name]

    @cached_property
    def common(self) -> Mapping[str, Any]:
        """All that is no tensor and belongs to no rank: `args`, `iteration`, the optimizer's settings, ..."""
        path = self.path / COMMON
        value = torch_zip.load(path.read_bytes(), path) if path.is_file() else self.read_object(COMMON_OBJECT)
        if not isinstance(value, dict):
            raise DamagedCheckpoint("the common data is no table", where=path)
        return value

    @property
    def objects(self) -> Sequence[str]:
        """The keys of `read_object`, e.g. `rng_state/shard_0.0_1.1`."""
        return list(self._index.objects)

    def read_object(self, key: str) -> Any:
        """A sharded object. Raises DamagedCheckpoint where there is none, and UnsafePickle."""
        if key not in self._index.objects:
            raise DamagedCheckpoint(f"no object {key}", where=self.path)
        span = self._index.objects[key]
        value = torch_zip.load(span.read(), span)
        if not isinstance(value, list) or len(value) != 1:  # Megatron wraps each in a list
            raise DamagedCheckpoint(f"{key} is not a list of one object", where=span)
        return value[0]

    @cached_property
    def args(self) -> Mapping[str, Any]:
        """Megatron's arguments; empty where none were saved."""
        args = self.common.get("args")
        return vars(args) if isinstance(args, argparse.Namespace) else {}

    @property
    def iteration(self) -> int | None:
        """None for a `release`: weights that belong to no run."""
        iteration = self.common.get("iteration")
        return iteration if isinstance(iteration, int) and self.path.name != "release" else None

    @cached_property
    def companions(self) -> Companions:
        return read_companions(self.path / COMPANIONS, links=False)

    @cached_property
    def model(self) -> ModelShape:
        """From the companions' config.json, checked against Megatron's arguments; else from these alone."""
        if _EMBEDDING not in self.specs:
            raise DamagedCheckpoint(f"no {_EMBEDDING}", where=self.path)
        rows = self.specs[_EMBEDDING].rows
        if "config.json" not in self.companions.files:
            return from_megatron_args(self.args, rows, self.path)
        path = self.path / COMPANIONS / "config.json"
        config = parse_json(self.companions.files["config.json"], path)
        model = dataclasses.replace(from_hf_config(config, path), padded_vocab_size=rows)
        if self.args:
            _check_agreement(model, from_megatron_args(self.args, rows, self.path), path)
        return model

    @cached_property
    def fp8(self) -> Fp8States | None:
        """The delayed-scaling state in `_extra_state`, else the one in the sidecar."""
        return self._extra_states() or sidecar.find(self.path)

    def _extra_states(self) -> Fp8States | None:
        recipe: DelayedScaling | None = None
        modules: dict[str, Fp8State] = {}
        raw: dict[str, Tensor] = {}
        for module, payload in self._payloads():
            where = f"{self.path}: {module}{EXTRA_STATE}"
            try:
                decoded = extra_state.decode_payload(payload, where)
            except NotUnderstood:
                raw[module] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
                continue
            if decoded:
                recipe = _same_recipe(recipe, decoded[0], where)
                modules[module] = decoded[1]
        if not modules and not raw:
            return None
        recorded = self.common.get(OURS)  # what a payload has no place for
        ours = recorded if isinstance(recorded, dict) else {}
        iteration = ours.get("fp8_iteration", self.iteration)
        producer = ours.get("fp8_producer", "transformer_engine")
        return Fp8States(recipe or DelayedScaling(), modules, raw, producer, iteration)

    def _payloads(self) -> Iterator[tuple[str, bytes]]:
        """Module and bytes of each `_extra_state` that is not empty."""
        for key in self._index.objects:
            name = object_name(key) or ""
            value = self.read_object(key) if name.endswith(EXTRA_STATE) else None
            data = value.getvalue() if isinstance(value, io.BytesIO) else value  # TE 1.x kept a file
            if isinstance(data, Tensor):
                data = data.reshape(-1).view(torch.uint8).numpy().tobytes()
            if data and not isinstance(data, bytes):
                raise DamagedCheckpoint(f"{key} holds no bytes", where=self.path)
            if data:
                yield name.removesuffix(EXTRA_STATE), data


def _same_recipe(known: DelayedScaling | None, recipe: DelayedScaling, where: str) -> DelayedScaling:
    if known not in (None, recipe):
        raise DamagedCheckpoint(f"its FP8 recipe {recipe} is not the other modules' {known}", where=where)
    return recipe


def _check_agreement(config: ModelShape, args: ModelShape, where: Path) -> None:
    """A config.json that travelled along may be older than the run that went on from it."""
    fields = (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("tied_embeddings", "norm_epsilon", "rotary_base"),
    )
    differing = [field for field in fields if getattr(config, field) != getattr(args, field)]
    if differing:
        values = ", ".join(f"{field} {getattr(config, field)} / {getattr(args, field)}" for field in differing)
        raise DamagedCheckpoint(
            f"it contradicts the arguments in {COMMON}: {values}",
            where=where,
            do="Remove it to go by the arguments alone.",
        )


def _logical(key: str, stored: dcp.StoredTensor, where: Path) -> Iterator[tuple[str, TensorSpec, list[_Part]]]:
    """The logical tensors in a stored one: itself, or one per layer where layers are stacked."""
    if not stored.shape or not is_stacked(key):
        parts = [_Part(_box(stored.shape, piece.offsets, piece.sizes, where), piece, 0) for piece in stored.pieces]
        yield _tiled(key, TensorSpec(stored.shape, stored.dtype), parts, where)
        return
    spec = TensorSpec(stored.shape[1:], stored.dtype)
    layers: list[list[_Part]] = [[] for _ in range(stored.shape[0])]
    for piece in stored.pieces:
        box = _box(spec.shape, piece.offsets[1:], piece.sizes[1:], where)
        for index in range(piece.sizes[0]):
            layers[piece.offsets[0] + index].append(_Part(box, piece, index * box.rows * box.columns))
    for layer, parts in enumerate(layers):
        yield _tiled(unstack(key, layer), spec, parts, where)


def _box(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], where: Path) -> Box:
    """A box per dimension as one of rows and columns; only the first two dimensions may be cut."""
    if sizes[2:] != shape[2:]:
        raise DamagedCheckpoint(f"a piece {sizes} at {offsets} of a tensor {shape}", where=where)
    inner = math.prod(shape[2:])
    row, rows = (offsets[0], sizes[0]) if shape else (0, 1)
    column, columns = (offsets[1] * inner, sizes[1] * inner) if len(shape) > 1 else (0, 1)
    return Box(row, rows, column, columns)


def _tiled(name: str, spec: TensorSpec, parts: list[_Part], where: Path) -> tuple[str, TensorSpec, list[_Part]]:
    """The same three, after checking that the boxes cover the tensor exactly once."""
    boxes = sorted((part.box for part in parts), key=lambda box: (box.row, box.column))
    overlap = any(box.intersect(other) for i, box in enumerate(boxes) for other in _beside(boxes, i))
    if overlap or sum(box.rows * box.columns for box in boxes) != spec.rows * spec.columns:
        raise DamagedCheckpoint(f"the pieces of {name} do not make one tensor {list(spec.shape)}", where=where)
    return name, spec, parts


def _beside(boxes: list[Box], index: int) -> Iterator[Box]:
    """The later of the sorted boxes that share rows with this one."""
    for other in boxes[index + 1 :]:
        if other.row >= boxes[index].row + boxes[index].rows:
            return
        yield other


def _chunk(name: str, spec: TensorSpec, part: _Part) -> Chunk:
    located = torch_zip.locate(part.piece.span)
    if (located.dtype, located.shape) != (spec.dtype, part.piece.sizes):
        raise DamagedCheckpoint(
            f"{name}: a piece is {located.dtype} {list(located.shape)}, not {spec.dtype} {list(part.piece.sizes)}",
            where=part.piece.span,
        )
    return Chunk(part.box, part.piece.span.path, located.offset + part.start * spec.dtype.itemsize)


CONTAINER = Container(
    recognise,
    TorchDistReader,
    f"{MARKER} of a Megatron torch_dist checkpoint, there or in the directory of an iteration",
)
