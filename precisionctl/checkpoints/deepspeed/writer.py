"""Write DeepSpeed's universal checkpoints, from which DeepSpeed continues with ZeRO 1, 2 or 3 on any number of ranks.

Which file DeepSpeed reads for what: version 0.19.8, runtime/base_optimizer.py, runtime/zero/stage3.py, engine.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.chunks import Chunk, whole
from precisionctl.checkpoints.deepspeed.states import BASE_OPTIMIZER_STATE
from precisionctl.checkpoints.deepspeed.universal import FP32, OPTIMIZER_STATE, ZERO
from precisionctl.checkpoints.hf_directory.config_json import config_of_values, write_beside
from precisionctl.checkpoints.hf_directory.fused_experts import stacked, stored_name
from precisionctl.checkpoints.other_trainers.trainer_run import TrainerRun
from precisionctl.checkpoints.output import FileLayout
from precisionctl.checkpoints.torch_files import torch_zip_writer
from precisionctl.dtypes import DType
from precisionctl.errors import MappingError, shown
from precisionctl.fp8.state import Fp8States
from precisionctl.param import MOMENTS, TensorSpec, kind_and_parameter

_VERSION = "0.19.8"


class DeepSpeedWriter:
    """Writes a folder with `latest_universal`, the directory that it names, config.json and tokenizer. `specs` are FP32
    masters by the names that the model's class has in memory, and AdamW's moments as
    `optimizer.state.<kind>.<tensor>`; `run` is what is known beside those. Equal input gives equal bytes."""

    def __init__(
        self,
        directory: Path,
        specs: Mapping[str, TensorSpec],
        companions: Companions,
        config: Mapping[str, Any],
        run: TrainerRun,
        iteration: int,
    ) -> None:
        self.directory, self.specs = directory, specs
        self._companions, self._config, self._run, self._iteration = companions, config, run, iteration
        self._tag = f"global_step{iteration}_universal"
        parameters = {kind_and_parameter(stored_name(name)[0])[1] for name in specs}
        if odd := [name for name in sorted(parameters) if not _can_be_a_directory(name)]:
            raise MappingError(f"{shown(odd[0])} is no name of a directory, which DeepSpeed has for each parameter")

    @cached_property
    def _stored(self) -> Mapping[Path, TensorSpec]:
        """The whole tensors, by file."""
        return {self._file(name): spec for name, spec in stacked(self.specs).items()}

    def _file(self, name: str) -> Path:
        kind, parameter = kind_and_parameter(name)
        return self.directory / self._tag / ZERO / parameter / f"{kind or FP32}.pt"

    def chunks(self, name: str) -> Sequence[Chunk]:
        spec, (stored, index) = self.specs[name], stored_name(name)
        path = self._file(stored)
        whole_spec = self._stored[path]
        (hole,) = _archive(whole_spec.dtype, whole_spec.shape).holes.values()
        return [Chunk(whole(spec), path, hole + (index or 0) * spec.nbytes)]

    def lay_out(self) -> None:
        for path, spec in self._stored.items():
            _archive(spec.dtype, spec.shape).write_around(path)

    def finish(self, fp8: Fp8States | None) -> None:
        """Write what is beside the parameters: Adam's count and settings, model states, config and tokenizer."""
        directory, count = self.directory / self._tag, torch_zip_writer.SmallTensor.of(self._run.updates)
        trained = [path.parent for path in self._stored if path.stem == MOMENTS[0]]
        step = torch_zip_writer.dump(count)
        for folder in trained:
            (folder / "step.pt").write_bytes(step)
        # Without weight decay, which each group keeps from the run that loads this: ZeRO 3 gives all groups the
        # settings of the first. ZeRO 1 and 2 skip the parameters of a group that has no settings here. All settings
        # are in BASE_OPTIMIZER_STATE.
        settings = {key: one for key, one in self._run.settings.items() if key in ("lr", "betas", "eps")}
        group = settings | {"params": []}
        decaying = {**self._run.settings, "params": []}
        optimizer = {
            "ds_version": _VERSION,
            "param_groups": [group] * len(trained),
            "optimizer_state_dict": {"state": {0: {"step": count}}, "param_groups": [group]},
            BASE_OPTIMIZER_STATE: {"param_groups": [decaying, decaying | {"weight_decay": 0.0}]},
        }
        (directory / ZERO / OPTIMIZER_STATE).write_bytes(torch_zip_writer.dump(optimizer))
        model = torch_zip_writer.dump(self._model_states([folder.name for folder in trained]))
        for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
            (directory / name).write_bytes(model)  # ZeRO 3 looks for the second
        config = config_of_values(self._companions, self._config, self.specs)
        write_beside(self.directory, self._companions, config, fp8)
        (self.directory / "latest_universal").write_text(self._tag)

    def _model_states(self, trained: Sequence[str]) -> dict[str, Any]:
        """The model states. `lr_scheduler` has the counts of torch's and DeepSpeed's schedulers; the schedule itself is
        the next run's."""
        shapes = {path.parent.name: spec.shape for path, spec in self._stored.items()}
        updates = self._run.updates
        counts = {"last_epoch": updates, "_step_count": updates + 1, "last_batch_iteration": updates - 1}
        return {
            "module": {},
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": [{name: shapes[name] for name in trained}],
            "frozen_param_shapes": {},
            "frozen_param_fragments": {},
            "shared_params": {},
            "lr_scheduler": counts | {"lr_lambdas": []},
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": 0,
            "global_steps": self._iteration,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "ds_config": {},
            "ds_version": _VERSION,
        }


def _can_be_a_directory(name: str) -> bool:
    """Whether a directory can have this name on Linux: one of up to 255 bytes, which are UTF-8 here."""
    if name in ("", "..") or "\0" in name or Path(name).name != name:
        return False
    try:
        return len(name.encode()) <= 255
    except UnicodeEncodeError:  # half a surrogate pair
        return False


@functools.cache
def _archive(dtype: DType, shape: tuple[int, ...]) -> FileLayout[torch_zip_writer.Blank]:
    """The file of a tensor of this dtype and shape."""
    return torch_zip_writer.lay_out({"param": torch_zip_writer.Blank(dtype, shape), "cat_dim": 0})
