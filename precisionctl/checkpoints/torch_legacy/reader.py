"""Read Megatron's `torch` checkpoints, as saved by `--ckpt-format torch` and by every Megatron-LM before 0.5.

Each rank saved its shards under its own names in one archive of torch.save. Opening reads the archives' pickles without
tensors; each logical tensor is then a set of boxes in the ranks' files. Replicas must be equal: for small tensors, and
for the copy of tied embeddings on the last stage, all bytes are compared; for large ones (attention, once for each
expert rank) the first replica is read. `torch_legacy/writer.py` is the inverse.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from precisionctl.architectures.families import from_hf_config
from precisionctl.architectures.megatron.heterogeneous_args import ENCODED
from precisionctl.architectures.megatron.megatron_args import HEAD_WISE_GATE
from precisionctl.architectures.megatron.recurrent_args import read_delta_net, read_mamba
from precisionctl.checkpoints.base import NO_HINTS, Container, Hints
from precisionctl.checkpoints.chunks import Box, Chunk, chunk_files, shard_boxes
from precisionctl.checkpoints.megatron.directory import MegatronReader, config_of
from precisionctl.checkpoints.megatron.keys import EXTRA_STATE, count_experts, find_iteration, iteration_of
from precisionctl.checkpoints.megatron.norm_names import is_indexed
from precisionctl.checkpoints.megatron.payloads import SavedPayload, payload_bytes
from precisionctl.checkpoints.megatron.towers import with_towers
from precisionctl.checkpoints.torch_files.te_tensors import LocatedFp8Weight
from precisionctl.checkpoints.torch_files.torch_zip import Inert, LocatedTensor, contiguous, read_located
from precisionctl.checkpoints.torch_legacy.buckets import FILE as BUCKETS, bucket_tensors
from precisionctl.checkpoints.torch_legacy.fp8_weights import Fp8Weights, codes_of, encodings_of
from precisionctl.checkpoints.torch_legacy.names import (
    count_layers,
    fc_weights,
    local_names,
    parallel_of,
    renumbered,
)
from precisionctl.checkpoints.torch_legacy.optimizer import (
    NO_OPTIMIZER,
    NO_PARAMETERS,
    common_optimizer,
    optimizer_tensors,
)
from precisionctl.checkpoints.torch_legacy.rank_directories import Rank, arguments, is_legacy, read_ranks
from precisionctl.checkpoints.torch_legacy.rank_shards import (
    SMALL,
    Shard,
    ShardedTensor,
    assembled,
    check_replicas,
    gathered,
)
from precisionctl.codes.encoding import Encoding
from precisionctl.errors import DROP_OPTIMIZER, DamagedCheckpoint, damage
from precisionctl.param import (
    EMBEDDING,
    GATED_ROWS,
    OUTPUT,
    REPLICATED,
    ROWS,
    TWICE_GATED_ROWS,
    Parallel,
    Parallelism,
    TensorSpec,
    kind_and_parameter,
    state_name,
)
from precisionctl.untrusted.safe_files import has_file

_GROUPED = (".mlp.experts.linear_fc1._extra_state", ".mlp.experts.linear_fc2._extra_state")
_QKV = (".linear_qkv.weight", ".linear_qkv.bias")


def recognise(path: Path) -> bool:
    """Whether `path` is the directory of an iteration, or one of its entries is."""
    return is_legacy(path) or (path.is_dir() and any(is_legacy(entry) for entry in path.iterdir() if entry.is_dir()))


class LegacyReader(MegatronReader):
    """A Megatron `torch` checkpoint: the directory of an iteration, or one of several (`iteration`, else the newest).

    Opening reads every rank's pickle and no tensors. Raises DamagedCheckpoint where ranks are missing or do not fit
    together, UnsafePickle for a file that asks for anything but Megatron's classes.
    """

    container = "torch"
    complete = staticmethod(is_legacy)

    def __init__(
        self,
        path: Path,
        iteration: int | None = None,
        hints: Hints = NO_HINTS,
        ranks: tuple[Parallelism, list[Rank]] | None = None,
    ) -> None:
        """`ranks` are those of `path`, for a subclass that has read them; else they are looked for and read."""
        self.path, self.hints = path, hints
        if ranks is None:
            self.path = find_iteration(path, iteration, self.complete)
            ranks = read_ranks(self.path)
        self.parallelism, self._ranks = ranks
        self._first = self._ranks[0].content
        self._chunks: dict[str, tuple[Chunk, ...]] = {}
        self._fp8: Fp8Weights = {}
        self._stages = list(self._numbered())
        located = (
            (rank, name, contiguous(value, name, rank.path))
            for rank, entries in self._stages
            for name, value in entries.items()
            if "_extra_state" not in name
        )
        self._shards = gathered(located, self.parallelism)
        self._join_tied(self._shards, OUTPUT, EMBEDDING)
        self._tensors = assembled(self._shards, self.parallelism, self._parallel)
        text = {name: tensor.spec for name, tensor in self._tensors.items()}
        self.specs = with_towers(text, self.towers, self.path)
        self.encodings: Mapping[str, Encoding] = encodings_of(self._tensors, self._fp8)

    @property
    def files(self) -> Sequence[Path]:
        """The ranks' files, and those of their distributed optimizers."""
        beside = [rank.path.with_name(BUCKETS) for rank in self._ranks]
        there = [path for path in beside if has_file(path, self.path)]
        return [*(rank.path for rank in self._ranks), *there, *sorted(chunk_files(self.towers, self.towers.specs))]

    @cached_property
    def args(self) -> Mapping[str, Any]:
        return arguments(self._first)

    @property
    def iteration(self) -> int | None:
        return iteration_of(self.path, self._first)

    def _numbered(self) -> Iterator[tuple[Rank, dict[str, Any]]]:
        """The entries of each stage of each rank, with the numbers that layers and experts have in the whole model.

        However layers are distributed (evenly, with another number on the first or last stage, or by a layout), stage i
        of pipeline rank p is virtual stage i * pipeline + p, and layers are numbered in the order of virtual stages.
        """
        read = [(rank, rank.chunks) for rank in self._ranks]
        indexed = any(is_indexed(map(str, chunk)) for _, chunks in read for chunk in chunks)
        stages = [(rank, [local_names(chunk, rank.path, indexed) for chunk in chunks]) for rank, chunks in read]
        virtual = {len(chunks) for _, chunks in stages}
        if len(virtual) > 1:
            raise DamagedCheckpoint(f"ranks with {sorted(virtual)} stages", where=self.path, do="Is the copy whole?")
        order = range(self.parallelism.pipeline * virtual.pop())
        layers: dict[int, set[int]] = {stage: set() for stage in order}
        for rank, chunks in stages:
            for index, chunk in enumerate(chunks):
                layers[index * self.parallelism.pipeline + rank.pipeline].add(count_layers(chunk))
        if uneven := [stage for stage in order if len(layers[stage]) > 1]:
            what = f"the ranks of stage {uneven[0]} hold {sorted(layers[uneven[0]])} layers"
            raise DamagedCheckpoint(what, where=self.path, do="Is the copy whole?")
        counts = [layers[stage].pop() for stage in order]
        if self.args.get(ENCODED):
            # A search may leave a layer without parameters: layers are distributed evenly, or with another number on
            # the first or last stage
            first, last = (self.args.get(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
            with damage("arguments that do not say how many layers are in each stage", self.path):
                sizes = replace(self.parallelism, first_layers=first, last_layers=last)
                said = sizes.layers_of_stages(self.args["num_layers"])
                if sum(said) != self.args["num_layers"] or any(map(operator.lt, said, counts)):
                    raise ValueError(said)
            counts = said
        for rank, chunks in stages:
            for index, chunk in enumerate(chunks):
                first_layer = sum(counts[: index * self.parallelism.pipeline + rank.pipeline])
                first_expert = rank.expert * count_experts(chunk)
                entries: dict[str, Any] = {}
                for name, value in chunk.items():
                    found = codes_of(value, rank.path, self._fp8) if isinstance(value, LocatedFp8Weight) else value
                    entries[renumbered(name, first_layer, first_expert)] = found
                yield rank, entries

    def _join_tied(self, shards: dict[str, dict[int, list[Shard]]], copy: str, of: str) -> None:
        """Make the last stage's copy of a tied embedding a replica of the embedding, if it has one."""
        tied = not self.args.get("untie_embeddings_and_output_weights", False)
        if tied and self.parallelism.pipeline > 1 and copy in shards and of in shards:
            for index, copies in shards.pop(copy).items():
                shards[of].setdefault(index, []).extend(copies)

    @cached_property
    def optimizer_specs(self) -> Mapping[str, TensorSpec]:
        """The optimizer's tensors, by parameter.

        Raises DamagedCheckpoint where they are not those of the model's parameters.
        """
        return {name: tensor.spec for name, tensor in self._optimizer.items()}

    @cached_property
    def _optimizer(self) -> dict[str, ShardedTensor]:
        stages: dict[Path, list[dict[str, LocatedTensor]]] = {rank.path: [] for rank in self._ranks}
        for rank, entries in self._stages:
            parameters = {name: value for name, value in entries.items() if isinstance(value, LocatedTensor)}
            stages[rank.path].append({name: v for name, v in parameters.items() if not name.endswith(NO_PARAMETERS)})
        located: list[tuple[Rank, str, LocatedTensor]] = []
        for rank in self._ranks:
            with damage(NO_OPTIMIZER, rank.path, DROP_OPTIMIZER):
                states = optimizer_tensors(rank.content, stages[rank.path], rank.path)
                located += ((rank, name, tensor) for name, tensor in states)
            beside = replace(rank, path=rank.path.with_name(BUCKETS), content={})
            if has_file(beside.path, self.path):
                located += ((beside, name, tensor) for name, tensor in bucket_tensors(beside.path, stages[rank.path]))

        shards = gathered(located, self.parallelism)
        for kind in {kind_and_parameter(name)[0] for name in shards}:
            self._join_tied(shards, state_name(kind, OUTPUT), state_name(kind, EMBEDDING))

        def as_its_parameter(name: str, shard: LocatedTensor) -> Parallel:
            return self.specs[kind_and_parameter(name)[1]].parallel

        return assembled(shards, self.parallelism, as_its_parameter)

    def _parallel(self, name: str, shard: LocatedTensor) -> Parallel:
        if name.endswith(("linear_q_down_proj.weight", "linear_kv_down_proj.weight")):
            # With Transformer Engine it is whole on every rank, and has as many rows as the latent has channels: those
            # of its norm, or inputs of the up projection. Without, it is cut by rows.
            norm = re.sub(r"linear_(q|kv)_down_proj", r"\1_layernorm", name)
            latent = self._shards.get(norm) or self._shards.get(name.replace("_down_proj", "_up_proj"))
            taken = latent[0][0].tensor.shape[-1:] if latent else ()
            return ROWS if taken and shard.shape[:1] < taken else REPLICATED
        down = re.sub(r"q_layernorm\.weight$", "linear_q_down_proj.weight", name)
        if name.endswith(("q_layernorm.weight", "k_layernorm.weight")) and (down == name or down not in self._shards):
            # A norm of one head is whole on every rank. A norm over all heads is cut: its shard is as long as a row of
            # the rank's linear_proj. With as many ranks as heads the two have one length, and no argument says which
            # of them it is. (The size of a head in the arguments does not hold for every layer.)
            query, proj = (
                self._shards.get(re.sub(r"[qk]_layernorm", module, name)) for module in ("q_layernorm", "linear_proj")
            )
            length = query[0][0].tensor.shape if query else ()
            heads = proj[0][0].tensor.shape[-1:] if proj else ()
            as_many = self.args.get("num_attention_heads") == self.parallelism.tensor
            return ROWS if length == heads and not (as_many and self._norms_one_head) else REPLICATED
        if name.endswith((".in_proj.weight", ".conv1d.weight", ".conv1d.bias")) and ".ple." not in name:
            mixer = name.rsplit(".", 2)[0]
            if f"{mixer}.x_proj.weight" in self._shards:  # Mamba-1's, of which no argument says anything
                return GATED_ROWS if "in_proj" in name else ROWS
            with damage("arguments that describe no gated delta net, and no mixer", self.path):
                cut = read_mamba(self.args) if "mixer." in name else read_delta_net(self.args)
            if cut is None:  # a short convolution, of which no argument says anything
                return TWICE_GATED_ROWS if "in_proj" in name else ROWS
            return replace(ROWS, parts=cut.in_proj_parts if "in_proj" in name else cut.conv_parts)
        if name.endswith("linear_qkv.weight") and self.args.get(HEAD_WISE_GATE):
            # Rows of groups, then of gates: as many of the latter as linear_proj reads heads
            with damage("heads with gates, and no linear_proj or kv_channels says how many", self.path):
                columns = self._shards[name.replace("linear_qkv", "linear_proj")][0][0].tensor.shape[1]
                gates = columns // int(self.args["kv_channels"])
                return replace(ROWS, parts=(shard.shape[0] - gates, gates))
        # If the first linear of an MLP has gate and up, it has twice as many rows as the second has columns
        shapes = [self._shards[weight][0][0].tensor.shape for weight in fc_weights(name) if weight in self._shards]
        matrices = len(shapes) == 2 and all(len(shape) == 2 for shape in shapes)
        return parallel_of(name, gated=matrices and shapes[0][0] == 2 * shapes[1][1])

    @cached_property
    def _norms_one_head(self) -> bool:
        """Whether norms of queries and keys are of one head, as far as is known: unless config.json says otherwise."""
        config = config_of(self.companions)
        return not (config and from_hf_config(config, self.companions.config_path).qk_layernorm_over_heads)

    def chunks(self, name: str) -> Sequence[Chunk]:
        if name in self.towers.specs:
            return self.towers.chunks(name)
        if name not in self._chunks:
            tensor = self._tensors.get(name) or self._optimizer[name]
            if tensor.spec.nbytes <= SMALL or name == EMBEDDING:
                check_replicas(name, tensor)
            version = self._first.get("checkpoint_version", 0)
            before_core = "language_model" in self._ranks[0].chunks[0]
            reordered = before_core and name.endswith(_QKV) and version in (0, 1.0)
            found = list[Chunk]()
            for (shard, *_), boxes in zip(tensor.shards, shard_boxes(tensor.spec, len(tensor.shards)), strict=True):
                offset = shard.tensor.offset
                for box in boxes:
                    found += (
                        self._qkv_boxes(box, shard, version) if reordered else [Chunk(box, shard.rank.path, offset)]
                    )
                    offset += box.elements * tensor.spec.dtype.itemsize
            self._chunks[name] = tuple(found)
        return self._chunks[name]

    def _qkv_boxes(self, box: Box, shard: Shard, version: float) -> Iterator[Chunk]:
        """A box of QKV rows whose order in the rank's shard is [3, heads, channels] (checkpoint version 0) or
        [heads, channels, 3] (1.0), as boxes in today's order [heads, 3, channels]
        (megatron/training/checkpointing.py, fix_query_key_value_ordering)."""
        heads = self.model.num_attention_heads // self.parallelism.tensor
        channels = self.model.kv_channels
        if box.rows != 3 * heads * channels:
            what = f"{box.rows} rows of QKV for {heads} heads of {channels} channels"
            raise DamagedCheckpoint(what, where=shard.rank.path)
        shape = (3, heads, channels) if version == 0 else (heads, channels, 3)
        rows = np.arange(box.rows).reshape(shape).transpose((1, 0, 2) if version == 0 else (0, 2, 1)).ravel().tolist()
        run = channels if version == 0 else 1
        pitch = box.columns * shard.tensor.dtype.itemsize
        for row in range(0, box.rows, run):
            part = Box(box.row + row, run, box.column, box.columns)
            yield Chunk(part, shard.rank.path, shard.tensor.offset + rows[row] * pitch)

    @cached_property
    def common(self) -> Mapping[str, Any]:
        """What the first rank saved besides the model: `args`, `iteration`, the schedule, ...; of the optimizer its
        settings and step, in the form of `torch_dist`. States of random generators differ between ranks and are Inert.
        """
        rank = self._ranks[0]
        models = {key for key in rank.content if re.fullmatch(r"model\d*", key)}
        kept = {key: value for key, value in rank.content.items() if key not in {*models, "optimizer", "rng_state"}}
        common: dict[str, Any] = _read(kept, rank.path)
        with damage(NO_OPTIMIZER, rank.path, DROP_OPTIMIZER):
            optimizer = common_optimizer(rank.content, rank.path)
        common |= {"optimizer": optimizer} if optimizer else {}
        return common | ({"rng_state": Inert()} if "rng_state" in rank.content else {})

    objects: Sequence[str] = ()
    """Keys of pickled objects beside the tensors: this container has none."""

    def read_object(self, key: str) -> Any:
        raise DamagedCheckpoint(f"no object {key}", where=self.path)

    checked_object = read_object

    def payloads(self) -> Iterator[SavedPayload]:
        """Each `_extra_state` that is not empty, from every rank: without `reduce_amax` they differ between ranks."""
        for rank, entries in self._stages:
            for name, value in entries.items():
                if EXTRA_STATE not in name or (isinstance(value, LocatedTensor) and not value.nbytes):
                    continue
                if data := payload_bytes(_read(value, rank.path), f"{rank.path}: {name}"):
                    yield SavedPayload(name, data, str(rank.path), rank.expert if name.endswith(_GROUPED) else None)


def _read(value: Any, path: Path) -> Any:
    """A part of a rank's content with its small tensors read."""
    if isinstance(value, LocatedTensor):
        return read_located(path, value) if value.nbytes <= SMALL else value
    if isinstance(value, dict):
        return {key: _read(item, path) for key, item in value.items()}
    return [_read(item, path) for item in value] if isinstance(value, list) else value


CONTAINER = Container(recognise, LegacyReader, "mp_rank_00/model_optim_rng.pt of a Megatron torch checkpoint")
