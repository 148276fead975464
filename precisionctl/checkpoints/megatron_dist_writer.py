"""Write Megatron's `torch_dist` checkpoints with PyTorch alone.

As megatron-core 0.18 and older wrote them, which every version reads: layers stacked, `common.pt` beside the
tensors, and an `_extra_state` for each module of which some version's Transformer Engine specification asks
for one, empty where there is no state.
"""

import argparse
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from precisionctl.checkpoints import dcp, torch_zip, torch_zip_writer
from precisionctl.checkpoints.base import Box, Chunk, Companions, shard_boxes
from precisionctl.checkpoints.megatron_keys import COMMON, COMPANIONS, EXTRA_STATE, MARKER, OURS, object_key, stack
from precisionctl.fp8 import extra_state, sidecar
from precisionctl.fp8.state import DelayedScaling, Fp8States
from precisionctl.model_shape import ModelShape, to_megatron_args
from precisionctl.param import ONE_RANK, Parallelism, TensorSpec

# modules with an `_extra_state` in the Transformer Engine specification of a dense GPT, megatron-core 0.12 to 0.19
_OF_LAYERS = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",  # asked for by megatron-core up to 0.14
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
_ONCE = ("decoder.final_layernorm",)  # norms have one since Transformer Engine 1.13

_ALIGNMENT = 64
"""Of records in a file, as of storages in a record: then tensors are aligned in the file."""


@dataclass(frozen=True)
class _Placed:
    """A box of a logical tensor, and the record that holds it."""

    name: str
    box: Box
    record: torch_zip_writer.Record
    piece: dcp.Piece

    @property
    def chunk(self) -> Chunk:
        return Chunk(self.box, self.piece.span.path, self.piece.span.offset + len(self.record.head))

    def write_around(self, file: int) -> None:
        """Write the record but for the tensor's bytes."""
        at = self.piece.span.offset
        os.pwrite(file, self.record.head, at)
        os.pwrite(file, self.record.tail, at + len(self.record.head) + self.record.nbytes)


class TorchDistWriter:
    """Writes the directory of one iteration, or a `release` (iteration None); the tracker is the caller's.

    `specs` may hold `optimizer.state.<kind>.<parameter>` beside the model. `fp8_in` says where FP8 state goes:
    into `_extra_state`, where a run in FP8 takes it up, or into the sidecar alone. `common` is added to
    `common.pt`, and `objects` (by whole key, e.g. `rng_state/shard_0.0_1.1`) are pickled beside the tensors.

    File sizes and offsets follow from the arguments alone; equal input gives equal bytes.
    """

    def __init__(
        self,
        directory: Path,
        model: ModelShape,
        specs: Mapping[str, TensorSpec],
        *,
        parallelism: Parallelism = ONE_RANK,
        iteration: int | None = None,
        companions: Companions | None = None,
        fp8_in: Literal["extra_state", "sidecar"] = "extra_state",
        common: Mapping[str, object] | None = None,
        objects: Mapping[str, object] | None = None,
    ) -> None:
        self.directory, self.model, self.specs = directory, model, specs
        self._parallelism, self._iteration, self._fp8_in = parallelism, iteration, fp8_in
        self._companions, self._common, self._objects = companions or Companions(), common or {}, objects or {}
        self._ranks = [self._place(rank) for rank in range(parallelism.tensor)]
        self._chunks: dict[str, list[Chunk]] = {name: [] for name in specs}
        for placed in itertools.chain(*self._ranks):
            self._chunks[placed.name].append(placed.chunk)

    def _place(self, rank: int) -> list[_Placed]:
        """The boxes of a tensor-parallel rank, one record after the other in its file."""
        path, offset, placed = self.directory / f"__{rank}_0.distcp", 0, []
        for name, spec in self.specs.items():
            _, layer = stack(name)
            for box in shard_boxes(spec, self._parallelism.tensor)[rank]:
                offsets, sizes = _dimensions(spec, box)
                if layer is not None:
                    offsets, sizes = (layer, *offsets), (1, *sizes)
                record = torch_zip_writer.record(spec.dtype, sizes)
                span = torch_zip.Span(path, offset, record.length)
                placed.append(_Placed(name, box, record, dcp.Piece(offsets, sizes, span)))
                offset += -(-record.length // _ALIGNMENT) * _ALIGNMENT
        return placed

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self._chunks[name]

    def lay_out(self) -> None:
        """Write all but the tensors' bytes, which stay holes; those of a file that is there are left alone."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for placed in filter(None, self._ranks):
            file = os.open(placed[0].piece.span.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                for each in placed:
                    each.write_around(file)
                os.ftruncate(file, placed[-1].piece.span.offset + placed[-1].record.length)
            finally:
                os.close(file)

    def finish(self, fp8: Fp8States | None) -> None:
        """Write objects, `.metadata`, common data, companions, and last `metadata.json`."""
        payloads = fp8 if self._fp8_in == "extra_state" else None
        dcp.write_index(self.directory, dcp.Index(self._stored(), self._write_objects(payloads)))
        (self.directory / COMMON).write_bytes(torch_zip_writer.dump(self._common_data(payloads)))
        for name, content in self._companions.files.items():
            (self.directory / COMPANIONS).mkdir(parents=True, exist_ok=True)
            (self.directory / COMPANIONS / name).write_bytes(content)
        if fp8 is not None and payloads is None:
            sidecar.write(self.directory / sidecar.RELATIVE, fp8)
        backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        marker = backend | {"common_backend": "torch", "common_backend_version": 1}
        (self.directory / MARKER).write_text(json.dumps(marker))

    def _stored(self) -> dict[str, dcp.StoredTensor]:
        """By key, the whole (stacked) shape and all pieces."""
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        pieces: dict[str, list[dcp.Piece]] = {}
        for placed in itertools.chain(*self._ranks):
            key, layer = stack(placed.name)
            spec = self.specs[placed.name]
            shapes[key] = (spec.shape if layer is None else (self.model.num_layers, *spec.shape), spec.dtype)
            pieces.setdefault(key, []).append(placed.piece)
        return {key: dcp.StoredTensor(*shapes[key], tuple(pieces[key])) for key in shapes}

    def _write_objects(self, fp8: Fp8States | None) -> dict[str, torch_zip.Span]:
        states = {object_key(name, self.model.num_layers): data for name, data in self._extra_states(fp8).items()}
        path, offset, spans = self.directory / "__0_1.distcp", 0, {}
        with open(path, "wb") as file:
            for key, value in (states | dict(self._objects)).items():
                record = torch_zip_writer.dump([value])  # Megatron wraps each in a list
                spans[key] = torch_zip.Span(path, offset, len(record))
                offset += file.write(record)
        return spans

    def _extra_states(self, fp8: Fp8States | None) -> dict[str, Tensor]:
        """The payload of each module that is asked for one, empty where it has no state, and of each that has one."""
        layers = [f"decoder.layers.{layer}.{part}" for layer in range(self.model.num_layers) for part in _OF_LAYERS]
        payloads = {module: torch.empty(0, dtype=torch.uint8) for module in (*layers, *_ONCE)}
        if fp8 is not None:
            payloads |= fp8.raw
            for module, state in fp8.modules.items():
                data = bytearray(extra_state.encode_payload(state, fp8.recipe))
                payloads[module] = torch.frombuffer(data, dtype=torch.uint8)
        return {module + EXTRA_STATE: payload for module, payload in payloads.items()}

    def _common_data(self, fp8: Fp8States | None) -> dict[str, object]:
        args = to_megatron_args(self.model) | self._run_args() | (_fp8_args(fp8.recipe) if fp8 else {})
        ours = {"fp8_iteration": fp8.iteration, "fp8_producer": fp8.producer} if fp8 else {}
        return {
            "args": argparse.Namespace(**args),
            "checkpoint_version": 3.0,
            "iteration": self._iteration or 0,
            "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
            "num_floating_point_operations_so_far": 0,
            OURS: ours,
        } | dict(self._common)

    def _run_args(self) -> dict[str, Any]:
        """Arguments that do not follow from the model. Optimizer and RNG state are not laid out as Megatron's."""
        dtype = next(iter(self.specs.values())).dtype
        return {
            "params_dtype": dtype,
            "bf16": dtype == torch.bfloat16,
            "fp16": dtype == torch.float16,
            "tensor_model_parallel_size": self._parallelism.tensor,
            "pipeline_model_parallel_size": 1,
            "virtual_pipeline_model_parallel_size": None,
            "expert_model_parallel_size": 1,
            "ckpt_format": "torch_dist",
            "iteration": self._iteration or 0,
            "no_save_optim": True,
            "no_save_rng": True,
        }


def _fp8_args(recipe: DelayedScaling) -> dict[str, Any]:
    return {
        "fp8": recipe.fp8_format.lower(),
        "fp8_recipe": "delayed",
        "fp8_margin": recipe.margin,
        "fp8_amax_history_len": recipe.amax_history_len,
        "fp8_amax_compute_algo": recipe.amax_compute_algo,
        "fp8_dot_product_attention": recipe.fp8_dpa,
        "fp8_multi_head_attention": recipe.fp8_mha,
    }


def _dimensions(spec: TensorSpec, box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes per dimension of a box of rows and columns. Only matrices are cut by columns."""
    if not spec.shape:
        return (), ()
    if box.columns == spec.columns:
        return (box.row, *(0 for _ in spec.shape[1:])), (box.rows, *spec.shape[1:])
    return (box.row, box.column), (box.rows, box.columns)
