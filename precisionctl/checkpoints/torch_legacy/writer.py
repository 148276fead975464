"""Write Megatron's `torch` checkpoints in constant memory: for each rank a directory with an archive.

Names are those of Transformer Engine's layer specs, as `--ckpt-format torch` saves them: layers are numbered from 0 in
each pipeline stage and experts in each rank, and the last stage has a copy of tied embeddings. Only a run with the same
parallel sizes can load the result.
"""

from __future__ import annotations

import argparse
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.chunks import Chunk, shard_boxes, whole
from precisionctl.checkpoints.hf_directory.companions import write_companions
from precisionctl.checkpoints.megatron.arguments import fp8_args, saved_args
from precisionctl.checkpoints.megatron.carried_run import NO_RUN, CarriedRun
from precisionctl.checkpoints.megatron.fp8_state_writer import demanded, grouped_payloads, origin_entry, write_sidecar
from precisionctl.checkpoints.megatron.keys import COMPANIONS, OURS, count_experts, expert_of, layer_of, without_expert
from precisionctl.checkpoints.megatron.logical import OPTIMIZER
from precisionctl.checkpoints.megatron.parameter_order import Modules, ordered
from precisionctl.checkpoints.output import FileLayout
from precisionctl.checkpoints.torch_files import torch_zip_writer
from precisionctl.checkpoints.torch_files.torch_zip_writer import Blank
from precisionctl.checkpoints.torch_legacy.names import renumbered
from precisionctl.checkpoints.torch_legacy.optimizer import optimizer_state
from precisionctl.checkpoints.torch_legacy.rank_directories import FILE, places, rank_directory
from precisionctl.checkpoints.torch_legacy.rank_shards import cut_for
from precisionctl.errors import MappingError, ShapeMismatch
from precisionctl.fp8.extra_state_writer import TeVersion
from precisionctl.fp8.state import Fp8States
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import EMBEDDING, MOMENTS, ONE_RANK, OUTPUT, Parallelism, TensorSpec, kind_and_parameter

_MODULES = Modules(fused=True, grouped=True)


@dataclass(eq=False)
class _TensorRanks:
    """The ranks of one pipeline stage and expert rank, which differ in their tensor rank alone: the tensors of each of
    their stages and of their optimizer, by the ranks' own names. Their shards have equal shapes, and so their files."""

    pipeline: int
    expert: int
    stages: list[dict[str, Blank]]
    optimizer: dict[tuple[str, int, str], Blank] = field(default_factory=dict)
    """By kind, stage and parameter."""
    paths: dict[int, Path] = field(default_factory=dict)
    """The files, by tensor rank."""
    holes: Mapping[Blank, int] = field(default_factory=dict)
    """Where in each file the tensors' bytes are."""


class LegacyWriter:
    """Writes the directory of one iteration or `release`. The caller writes the tracker file.

    `specs` are the logical tensors, with `optimizer.state.<kind>.<parameter>` for an optimizer, which is written in the
    form of Megatron's plain (not distributed) optimizer. Every rank's file has all of `run` but its objects, for which
    this format has no place. FP8 state that is `live` goes into `_extra_state`, for a run in FP8, in the form of TE 1.x
    or 2.x (`te`), other only into the sidecar.

    File sizes and offsets follow from the arguments alone; equal input gives equal bytes. The plan has already checked
    that layers, experts and tensors divide by the sizes. Raises ShapeMismatch for sizes that this format cannot
    express, MappingError for tensors of another optimizer than Adam.
    """

    def __init__(
        self,
        directory: Path,
        model: ModelShape,
        specs: Mapping[str, TensorSpec],
        *,
        parallelism: Parallelism = ONE_RANK,
        run: CarriedRun = NO_RUN,
        companions: Companions | None = None,
        live: bool = True,
        te: TeVersion = 2,
    ) -> None:
        self.directory, self.model, self.specs = directory, model, specs
        self._sizes, self._run, self._companions = parallelism, run, companions or Companions()
        self._live, self._te = live, te
        self._args = saved_args(run.args, model, specs, parallelism, run.iteration, "torch")
        self._args["use_distributed_optimizer"] = False
        self._starts = [0, *accumulate(parallelism.layers_of_stages(model.num_layers))][:-1]
        self._experts = count_experts(specs)
        if parallelism.tensor % (parallelism.expert_tensor or 1):
            raise ShapeMismatch(
                f"experts cut for {parallelism.expert_tensor} ranks have no place in directories of "
                f"{parallelism.tensor} tensor ranks",
                do="Megatron's torch format takes only expert tensor sizes that divide the tensor size; "
                "use torch_dist.",
            )
        kinds = {name: kind for name in specs if (kind := kind_and_parameter(name)[0])}
        if other := [name for name, kind in kinds.items() if kind not in ("param", *MOMENTS)]:
            # Muon has a `momentum_buffer` in a second optimizer beside Adam
            raise MappingError(
                f"`{other[0]}` is not Adam's: how Megatron's torch format stores it is not known here",
                do="Write torch_dist, which keeps it by name, or leave the optimizer behind with --drop-optimizer.",
            )
        of_place: dict[tuple[int, int], _TensorRanks] = {}
        for tensor, stage, expert in places(parallelism):
            new = _TensorRanks(stage, expert, [{} for _ in range(parallelism.virtual)])
            path = directory / rank_directory(tensor, stage, expert, parallelism) / FILE
            of_place.setdefault((stage, expert), new).paths[tensor] = path
        self._ranks = list(of_place.values())
        self._of_stage: dict[int, list[_TensorRanks]] = {}
        for ranks in self._ranks:
            self._of_stage.setdefault(ranks.pipeline, []).append(ranks)
        self._placed = self._place()

    def _place(self) -> dict[str, list[tuple[_TensorRanks, Blank]]]:
        """Fill the ranks' stages and optimizers with Blanks, and return those of each logical tensor."""
        placed: dict[str, list[tuple[_TensorRanks, Blank]]] = {name: [] for name in self.specs}
        for name, spec in self.specs.items():
            kind, parameter = kind_and_parameter(name)
            size, shape = cut_for(parameter, self._sizes), spec.shape
            if size > 1 and spec.parallel.kind == "columns":
                shape = (spec.rows, spec.columns // size)
            elif size > 1 and spec.parallel.kind == "rows":
                shape = (spec.rows // size, *spec.shape[1:])
            for ranks, stage, local in self._holders(parameter):
                blank = Blank(spec.dtype, shape)
                if kind:
                    ranks.optimizer[kind, stage, local] = blank
                else:
                    ranks.stages[stage][local] = blank
                placed[name].append((ranks, blank))
        for ranks in self._ranks:
            # In the order of the modules, by which Megatron numbers parameters; as they are if a name is not known
            ranks.stages = [{name: stage[name] for name in ordered(stage, _MODULES) or stage} for stage in ranks.stages]
            ranks.holes = self._archive(ranks, {}, None).holes
        return placed

    def _holders(self, name: str) -> Iterator[tuple[_TensorRanks, int, str]]:
        """The ranks that hold a tensor of the model, the number of its stage on them, and its name there."""
        starts, of_rank = self._starts, self._experts // self._sizes.expert
        stages, layer, expert = len(starts), layer_of(name), expert_of(name)
        first = bisect(starts, layer[0]) - 1 if layer else 0 if name.startswith("embedding.") else stages - 1
        expert_rank = None if expert is None else expert // of_rank
        homes = [(first, renumbered(name, -starts[first], -(expert_rank or 0) * of_rank))]
        if self._sizes.pipeline > 1 and name.startswith("embedding."):
            if name == EMBEDDING and self.model.tied_embeddings:
                homes.append((stages - 1, OUTPUT))
            if self.model.mtp_num_layers:  # multi-token prediction, on the last stage, embeds tokens, too
                homes.append((stages - 1, name))
        for stage, local in homes:
            for ranks in self._of_stage[stage % self._sizes.pipeline]:
                if expert_rank in (None, ranks.expert):
                    yield ranks, stage // self._sizes.pipeline, local

    def chunks(self, name: str) -> Sequence[Chunk]:
        """Made when they are asked for: all of a large model's are hundreds of thousands."""
        spec, found = self.specs[name], []
        replicated = spec.parallel.kind == "replicated"
        shards = [[whole(spec)]] if replicated else shard_boxes(spec, cut_for(kind_and_parameter(name)[1], self._sizes))
        for ranks, blank in self._placed[name]:
            for tensor, path in ranks.paths.items():
                offset = ranks.holes[blank]
                for box in shards[tensor % len(shards)]:
                    found.append(Chunk(box, path, offset))
                    offset += box.elements * blank.dtype.itemsize
        return found

    @property
    def copied(self) -> int:
        """Bytes that are written beyond those of `specs`, as several ranks have the same rows."""
        held = (each for placed in self._placed.values() for each in placed)
        written = sum(blank.nbytes * len(ranks.paths) for ranks, blank in held)
        return written - sum(spec.nbytes for spec in self.specs.values())

    def lay_out(self) -> None:
        """Create the files with everything but the tensors' bytes. Tensors in existing files are not changed."""
        self._write_around(None)

    def finish(self, fp8: Fp8States | None) -> None:
        """Write FP8 state and companion files."""
        self._write_around(fp8 if self._live else None)
        write_companions(self.directory / COMPANIONS, self._companions)
        write_sidecar(self.directory, fp8, live=self._live)

    def _write_around(self, fp8: Fp8States | None) -> None:
        """Write each rank's file except for the bytes of tensors."""
        # The `_extra_state` of each module for which a run expects one, by the ranks that have it, then by stage and
        # name there. Empty payloads (uint8 `[0]`) where there is no state
        model = [name for name in self.specs if not name.startswith(OPTIMIZER)]
        size, of_rank = self._sizes.expert, self._experts // self._sizes.expert
        states = [grouped_payloads(fp8, self._te, rank, size, of_rank) if fp8 else {} for rank in range(size)]
        payloads: dict[_TensorRanks, dict[tuple[int, str], object]] = {ranks: {} for ranks in self._ranks}
        for name in dict.fromkeys([*(without_expert(name)[0] for name in demanded(model)), *states[0]]):
            for ranks, stage, local in self._holders(name):
                payloads[ranks][stage, local] = states[ranks.expert].get(name, torch_zip_writer.EMPTY)

        for ranks in self._ranks:
            archive = self._archive(ranks, payloads[ranks], fp8)
            for path in ranks.paths.values():
                archive.write_around(path)

    def _archive(
        self, ranks: _TensorRanks, payloads: Mapping[tuple[int, str], object], fp8: Fp8States | None
    ) -> FileLayout[Blank]:
        """The layout of these ranks' files: tensors first, so that their offsets do not depend on the size of FP8
        state."""
        stages: list[dict[str, object]] = [{**stage} for stage in ranks.stages]
        for (stage, local), payload in payloads.items():
            stages[stage][local] = payload
        args = self._args | (fp8_args(fp8) if fp8 else {})
        content: dict[str, object] = {
            "args": argparse.Namespace(**args),
            "checkpoint_version": 3.0,
            "iteration": self._run.iteration or 0,
            "num_floating_point_operations_so_far": 0,
        }
        if ours := {**self._run.entry, **(origin_entry(fp8) if fp8 else {})}:
            content[OURS] = ours
        content |= {key: value for key, value in self._run.common.items() if key != "optimizer"}
        if ranks.optimizer:
            settings = self._run.common.get("optimizer")
            content["optimizer"] = optimizer_state(ranks.stages, ranks.optimizer, settings, self._sizes.expert > 1)
        names = ["model"] if len(stages) == 1 else [f"model{index}" for index in range(len(stages))]
        return torch_zip_writer.lay_out(content | dict(zip(names, stages, strict=True)))
