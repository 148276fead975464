"""Write Megatron's `torch_dist` checkpoints with PyTorch alone.

The form is that of megatron-core up to 0.18, which every version reads: layers stacked if they are all alike,
`common.pt` beside the tensors, and an `_extra_state` for each module for which some version's Transformer Engine layer
spec expects one, empty where there is no state.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from precisionctl.architectures.megatron.heterogeneous_args import ENCODED
from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.chunks import Chunk
from precisionctl.checkpoints.hf_directory.companions import write_companions
from precisionctl.checkpoints.megatron.arguments import fp8_args, saved_args
from precisionctl.checkpoints.megatron.carried_run import NO_RUN, RESHARDABLE, CarriedRun
from precisionctl.checkpoints.megatron.fp8_state_writer import demanded, origin_entry, payloads_of, write_sidecar
from precisionctl.checkpoints.megatron.keys import COMMON, COMPANIONS, MARKER, OURS, count_experts, object_key, stack
from precisionctl.checkpoints.megatron.logical import OPTIMIZER, with_plain_masters
from precisionctl.checkpoints.megatron.provider import describes, write_run_config
from precisionctl.checkpoints.torch_dist.placement import Placement, layers_differ
from precisionctl.checkpoints.torch_files import dcp_metadata, torch_zip, torch_zip_writer
from precisionctl.dtypes import DType
from precisionctl.errors import PrecisionError
from precisionctl.fp8.extra_state_writer import TeVersion
from precisionctl.fp8.state import Fp8States
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import ONE_RANK, Parallelism, TensorSpec


class TorchDistWriter:
    """Writes the directory of one iteration or `release`. The caller writes the tracker file.

    `specs` are the logical tensors, with `optimizer.state.<kind>.<parameter>` for an optimizer, which is written in a
    form that both Megatron's plain optimizer and its distributed one load. FP8 state that is `live` goes into
    `_extra_state`, for a run in FP8, in the form of TE 1.x or 2.x (`te`), other only into the sidecar.

    `parallelism` decides how tensors are cut and which files they go to; a run of any other sizes can load them. File
    sizes and offsets follow from the arguments alone; equal input gives equal bytes. Raises PrecisionError for experts
    of different dtypes, which cannot be stacked.
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
        self._parallelism, self._run, self._companions = parallelism, run, companions or Companions()
        self._live, self._te = live, te
        self._args = saved_args(run.args, model, specs, parallelism, run.iteration, "torch_dist")

        # Megatron loads each layer under its own key also where all happen to be alike
        # (TransformerBlock.sharded_state_dict; of hybrid models, MambaStack.sharded_state_dict)
        frequencies = (self._args.get("moe_layer_freq"), self._args.get("linear_attention_freq"))
        by_kind = any(isinstance(each, list) or (type(each) is int and each > 1) for each in frequencies)
        of_blocks = bool(self._args.get("is_hybrid_model") or self._args.get(ENCODED))
        self._by_layer = by_kind or of_blocks or layers_differ(specs)
        self._keys = {name: stack(name, self._by_layer) for name in specs}

        dtypes: dict[str, DType] = {}
        for name, (key, _) in self._keys.items():
            dtype, others = specs[name].dtype, dtypes.setdefault(key, specs[name].dtype)
            if dtype != others:
                what = f"`{name}` is {dtype}, others of its stack are {others}: torch_dist has one for all"
                raise PrecisionError(what, do="Give --precision bf16, or --container torch.")

    @cached_property  # a plan needs no places
    def _placement(self) -> Placement:
        return Placement(self.directory, self.specs, self._keys, self._parallelism)

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self._placement.chunks[name]

    def lay_out(self) -> None:
        self._placement.lay_out()

    def finish(self, fp8: Fp8States | None) -> None:
        """Write objects, `.metadata`, common data, FP8 state, companion files, and last `metadata.json`."""
        payloads = fp8 if self._live else None
        stored = with_plain_masters(self._placement.stored)
        dcp_metadata.write_index(self.directory, dcp_metadata.Index(stored, self._write_objects(payloads)))
        own_provider = any("post_layernorm" in name for name in self.specs)
        if describes(self.model) and not own_provider:
            write_run_config(self.directory, self._args, self.model)
        args = self._args | (fp8_args(payloads) if payloads else {})
        ours = {**self._run.entry, **(origin_entry(payloads) if payloads else {})}
        # Since 0.13 Megatron derives from these which keys to load
        content: dict[str, object] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        if self._by_layer:
            content["non_homogeneous_layers"] = True
        if any(name.startswith(OPTIMIZER) for name in self.specs):
            content["distrib_optim_sharding_type"] = RESHARDABLE
        (self.directory / COMMON).write_bytes(
            torch_zip_writer.dump(
                {
                    "args": argparse.Namespace(**args),
                    "checkpoint_version": 3.0,
                    "iteration": self._run.iteration or 0,
                    "content_metadata": content,
                    "num_floating_point_operations_so_far": 0,
                    OURS: ours,
                }
                | dict(self._run.common)
            )
        )
        write_companions(self.directory / COMPANIONS, self._companions)
        write_sidecar(self.directory, fp8, live=self._live)
        backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        marker = backend | {"common_backend": "torch", "common_backend_version": 1}
        (self.directory / MARKER).write_text(json.dumps(marker))

    def _write_objects(self, fp8: Fp8States | None) -> dict[str, torch_zip.Span]:
        """Write all objects into one file: the `_extra_state` of modules, with this state or empty, and those of the
        run. Returns where each is, by its key."""
        model = [name for name in self.specs if not name.startswith(OPTIMIZER)]
        experts = count_experts(model) or 1
        empty = dict.fromkeys(demanded(model), torch_zip_writer.EMPTY)
        payloads = {**empty, **(payloads_of(fp8, self._te, self._parallelism.expert) if fp8 else {})}
        states = {
            object_key(name, self.model.num_layers, experts, self._by_layer): data for name, data in payloads.items()
        }
        path, offset, spans = self._placement.free_file, 0, {}
        with open(path, "wb") as file:
            for key, value in (states | dict(self._run.objects)).items():
                # Megatron wraps each in a list
                record = value.read() if isinstance(value, torch_zip.Span) else torch_zip_writer.dump([value])
                spans[key] = torch_zip.Span(path, offset, len(record))
                offset += file.write(record)
        return spans
