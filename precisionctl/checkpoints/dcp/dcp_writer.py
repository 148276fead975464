"""Write PyTorch's own checkpoints (DCP) with Hugging Face's names, as `dcp.save` writes `{"model": ..., "optimizer":
...}` of `get_state_dict`, so that trainers load what they have names for in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.chunks import Chunk
from precisionctl.checkpoints.hf_directory.config_json import config_of_values, write_beside
from precisionctl.checkpoints.hf_directory.fused_experts import stored_name
from precisionctl.checkpoints.other_trainers.torchtitan_families import BIAS, GATE
from precisionctl.checkpoints.other_trainers.trainer_run import ADAMW_SETTINGS, TrainerRun, decays
from precisionctl.checkpoints.torch_dist.placement import Placement
from precisionctl.checkpoints.torch_files import dcp_metadata, torch_zip, torch_zip_writer
from precisionctl.dtypes import DType
from precisionctl.errors import DROP_OPTIMIZER, MappingError
from precisionctl.fp8.state import Fp8States
from precisionctl.param import MOMENTUM, ONE_RANK, STATE, TensorSpec, kind_and_parameter, state_name

PIECE_BYTES = 256 << 20
"""Most bytes in a piece: a rank that loads a shard reads whole pieces."""

_SWITCHES: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""The other keys of a parameter group of torch.optim.AdamW."""

_UNDECAYED = {"weight_decay": 0.0}


def muons_matrices(specs: Mapping[str, TensorSpec]) -> list[str]:
    """The parameters that Muon trained, under the names of the model's class. Raises MappingError for one that torch's
    Muon does not take."""
    prefix = state_name(MOMENTUM, "")
    taken = {name.removeprefix(prefix): spec for name, spec in specs.items() if name.startswith(prefix)}
    for name, spec in taken.items():
        stored, expert = stored_name(name)
        if expert is not None or len(spec.shape) != 2:
            what = f"Muon trained `{stored}`, which is no matrix in transformers, and torch's Muon takes matrices alone"
            raise MappingError(what, do=DROP_OPTIMIZER)
    return [*taken]


class DcpWriter:
    """Writes a DCP directory: `.metadata` and data files, beside config.json and the tokenizer.

    `specs` are the model's tensors, under the names that its class has in memory, and AdamW's moments and Muon's
    momentum as `optimizer.state.<kind>.<tensor>`. `run` has AdamW's count and settings, and torch's Muon's. As in
    trainers, there are two parameter groups of AdamW, matrices, which have weight decay, and the rest; what Muon
    trained is a third. Equal input gives equal bytes. Raises as `muons_matrices`.
    """

    def __init__(
        self,
        directory: Path,
        specs: Mapping[str, TensorSpec],
        companions: Companions,
        config: Mapping[str, Any],
        run: TrainerRun | None = None,
    ) -> None:
        self.directory, self.specs = directory, specs
        self._companions, self._config, self._run = companions, config, run
        muons_matrices(specs)
        self._paths: dict[str, tuple[str | int, ...]] = {}

    @cached_property  # a plan needs no places
    def placement(self) -> Placement:
        keys: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name in self.specs:
            stored, expert = stored_name(name)
            kind, parameter = kind_and_parameter(stored)
            path = self._path_of_state(parameter, kind) if kind else self._path_of_weight(stored)
            key = ".".join(path)
            self._paths[key] = path
            keys[name] = key, () if expert is None else (expert,)
        return Placement(self.directory, self.specs, keys, ONE_RANK, PIECE_BYTES)

    def _path_of_weight(self, name: str) -> tuple[str, ...]:
        return "model", name

    def _path_of_state(self, parameter: str, kind: str) -> tuple[str, ...]:
        return "optimizer", "state", parameter, kind

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self.placement.chunks[name]

    def lay_out(self) -> None:
        self.placement.lay_out()

    def finish(self, fp8: Fp8States | None) -> None:
        """Write Adam's counts and settings, companion files, FP8 state, and last `.metadata`."""
        tensors, objects = dict(self.placement.stored), dict[str, torch_zip.Span]()
        path, offset = self.placement.free_file, 0
        with open(path, "wb") as file:
            for place_of, record, shape in self._small_entries():
                key = ".".join(map(str, place_of))
                self._paths[key], span = place_of, torch_zip.Span(path, offset, len(record))
                if shape is None:
                    objects[key] = span
                else:
                    piece = dcp_metadata.DcpPiece((0,) * len(shape), shape, span)
                    tensors[key] = dcp_metadata.DcpTensor(shape, DType.float32, (piece,))
                offset += file.write(record)
        config = config_of_values(self._companions, self._config, self.specs)
        write_beside(self.directory, self._companions, config, fp8)
        dcp_metadata.write_index(self.directory, dcp_metadata.Index(tensors, objects), self._paths)

    def _small_entries(self) -> Iterator[tuple[tuple[str | int, ...], bytes, tuple[int, ...] | None]]:
        """Yield the optimizer's small entries, each with its path in the state dict, its archive and its shape (None
        for objects): the count of each parameter, a tensor of shape [], and the settings of the groups."""
        prefix = state_name("exp_avg", "")
        moments = {name.removeprefix(prefix): spec for name, spec in self.specs.items() if name.startswith(prefix)}
        if not self._run or not moments:
            return
        decayed = {}
        for name, spec in moments.items():
            stored = stored_name(name)[0]
            decayed[stored] = decays(stored, spec.shape)
        count = torch_zip_writer.dump(torch_zip_writer.SmallTensor.of(self._run.updates))
        for name in decayed:
            yield self._path_of_state(name, "step"), count, ()
        known = {**self._run.settings, **self._run.defaults(ADAMW_SETTINGS)}
        settings = {key: known[key] for key in ADAMW_SETTINGS} | _SWITCHES
        for place_of, value in self._settings(decayed, settings):
            yield place_of, torch_zip_writer.dump(value), None
        if self._run.muon:  # with `[adamw, muon]` as get_state_dict's optimizers
            for key, value in {**self._run.muon, "params": muons_matrices(self.specs)}.items():
                yield ("optimizer", "param_groups", 2, key), torch_zip_writer.dump(value), None

    def _settings(
        self, decayed: Mapping[str, bool], settings: Mapping[str, Any]
    ) -> Iterator[tuple[tuple[str | int, ...], Any]]:
        """The `settings` of AdamW, each with its path, in two groups: of the parameters that decay, and of others."""
        for number, undecayed in enumerate((False, True)):
            group = {**settings, "params": [name for name, does in decayed.items() if does != undecayed]}
            for key, value in (group | (_UNDECAYED if undecayed else {})).items():
                yield ("optimizer", "param_groups", number, key), value


class TorchtitanWriter(DcpWriter):
    """As DcpWriter, but as torchtitan's checkpoint manager writes it: weights at the top, the optimizer flat, with
    settings for each parameter, and the run's `iteration` as the progress of training and of its schedule, which takes
    a step in each iteration (LRSchedulersContainer). `specs` have torchtitan's names. The bias by which it balances
    experts begins at zero where `specs` have none."""

    def __init__(
        self,
        directory: Path,
        specs: Mapping[str, TensorSpec],
        companions: Companions,
        config: Mapping[str, Any],
        run: TrainerRun | None,
        iteration: int,
    ) -> None:
        super().__init__(directory, specs, companions, config, run)
        self._iteration = iteration

    def _small_entries(self) -> Iterator[tuple[tuple[str | int, ...], bytes, tuple[int, ...] | None]]:
        yield from super()._small_entries()
        for name, spec in self.specs.items():
            bias = name.removesuffix(GATE) + BIAS
            if name.endswith(GATE) and not name.startswith(STATE) and bias not in self.specs:
                shape = spec.shape[:1]
                zeros = torch_zip_writer.SmallTensor(DType.float32, shape, bytes(shape[0] * DType.float32.itemsize))
                yield self._path_of_weight(bias), torch_zip_writer.dump(zeros), shape

    def _path_of_weight(self, name: str) -> tuple[str, ...]:
        return (name,)

    def _path_of_state(self, parameter: str, kind: str) -> tuple[str, ...]:
        return "optimizer", f"state.{parameter}.{kind}"

    def _settings(
        self, decayed: Mapping[str, bool], settings: Mapping[str, Any]
    ) -> Iterator[tuple[tuple[str | int, ...], Any]]:
        for parameter, does in decayed.items():
            for key, value in (settings if does else {**settings, **_UNDECAYED}).items():
                yield ("optimizer", f"param_groups.{parameter}.{key}"), value
        yield ("lr_scheduler", "last_epoch"), self._iteration
        yield ("train_state", "step"), self._iteration
        yield ("train_state", "ntokens_seen"), 0
