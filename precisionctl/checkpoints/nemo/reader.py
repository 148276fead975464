"""Read NeMo 1's checkpoints (`.nemo`, and what is unpacked of one), as NLPSaveRestoreConnector writes them
(nemo/collections/nlp/parts/nlp_overrides.py, NeMo 1.23 and 2.0).

`model_config.yaml` describes the model. Models of Megatron-Core are in `model_weights/`, in `zarr` or `torch_dist`; all
others are a state dict in `model_weights.ckpt`, or one for each rank in `mp_rank_TT/` or `tp_rank_TT_pp_rank_PPP/`.
There is no optimizer. The tokenizer's files have names of NeMo's own, and are not read.
"""

import argparse
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.base import NO_HINTS, WITH_REFERENCE, Container, Hints, without_iterations
from precisionctl.checkpoints.megatron.directory import MegatronReader
from precisionctl.checkpoints.megatron.keys import MARKER
from precisionctl.checkpoints.nemo import config, zarr
from precisionctl.checkpoints.nemo.files import Files, files_of, read_text
from precisionctl.checkpoints.other_trainers.trainer_directory import by_model_names
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.torch_files import dcp_metadata, torch_zip
from precisionctl.checkpoints.torch_files.torch_zip import Span
from precisionctl.checkpoints.torch_legacy.rank_directories import Rank
from precisionctl.checkpoints.torch_legacy.reader import LegacyReader
from precisionctl.errors import CheckpointError, DamagedCheckpoint, UnknownFormat, shown
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import Parallelism, TensorSpec
from precisionctl.paths import above, own_name
from precisionctl.sizes import counted
from precisionctl.untrusted.safe_json import parse_json

_CONFIG = "model_config.yaml"
_SHARDED, _STATE = "model_weights", "model_weights.ckpt"
_RANK = re.compile(rf"(?:(?:mp|tp)_rank_(\d{{2,6}})(?:_pp_rank_(\d{{3,6}}))?/)?{re.escape(_STATE)}")
_PREFIX = re.compile(r"^model\.(?:module\.)?")


def recognise(path: Path) -> bool:
    """Whether `path` is a `.nemo`, or has a configuration and weights of NeMo's."""
    if (path.suffix == ".nemo" and path.is_file()) or _is_weights(path):
        return True
    weights = (_SHARDED, _STATE, f"mp_rank_*/{_STATE}", f"tp_rank_*/{_STATE}")
    return (path / _CONFIG).is_file() and any(any(path.glob(pattern)) for pattern in weights)


def _is_weights(path: Path) -> bool:
    """Whether `path` is the `model_weights/` inside a directory of NeMo's."""
    return own_name(path) == _SHARDED and path.is_dir() and (above(path) / _CONFIG).is_file()


class _Nemo(MegatronReader):
    """The common part of the Readers of NeMo's checkpoints: what follows from the configuration."""

    container = "nemo"
    iteration = None
    optimizer_specs: Mapping[str, TensorSpec] = {}
    _config: Mapping[str, Any]

    @cached_property
    def args(self) -> Mapping[str, Any]:
        return config.to_megatron_args(self._config, f"{self.path}, {_CONFIG}")

    @cached_property
    def model(self) -> ModelShape:
        beyond = [name for name in config.BEYOND if self._config.get(name)]
        if beyond and "config.json" not in self.companions.files:
            what = f"its {beyond[0]} is not read: nothing else says it"
            raise CheckpointError(what, where=self.path, do=WITH_REFERENCE)
        return super().model


class NemoSharded(_Nemo, TorchDistReader):
    """A model in `model_weights/`. Opening it reads the index of `torch_dist`, or the `.zarray` of every tensor.

    Raises DamagedCheckpoint and UnsafePickle as TorchDistReader and `zarr.tensors_of` do.
    """

    common: Mapping[str, Any] = {}

    def __init__(self, path: Path, files: Files, hints: Hints) -> None:
        self._config = _read_config(path, files)
        marker = files[f"{_SHARDED}/{MARKER}"]
        self._backend = parse_json(read_text(marker), marker).get("sharded_backend")
        index = _read_index(path, files, self._backend)
        _check_text(index.tensors, self._config, path)
        super().__init__(path, hints=hints, index=index)

    def notes(self) -> Iterator[str]:
        yield from super().notes()
        if self._config.get("fp8") and self._backend == "zarr":
            yield "The run was in FP8, and its FP8 state stays behind: it is not read of Megatron-Core's `zarr`."


class NemoRanks(_Nemo, LegacyReader):
    """A model in state dicts of ranks, or of one. Opening it reads their pickles.

    Raises DamagedCheckpoint and UnsafePickle as LegacyReader does, and DamagedCheckpoint where ranks are missing, there
    twice, or others than the configuration says.
    """

    def __init__(self, path: Path, files: Files, hints: Hints) -> None:
        self._config = _read_config(path, files)
        parallelism, ranks = _read_ranks(path, files, self._config)
        _check_text((name for rank in ranks for name in rank.content["model"]), self._config, path)
        super().__init__(path, hints=hints, ranks=(parallelism, ranks))

    @property
    def files(self) -> Sequence[Path]:
        return sorted({rank.path for rank in self._ranks})


def _read_config(path: Path, files: Files) -> Mapping[str, Any]:
    if _CONFIG not in files:
        raise DamagedCheckpoint(f"no {_CONFIG} in it", where=path, do="Is the copy whole?")
    return config.parse(read_text(files[_CONFIG]), f"{path}, {_CONFIG}")


def _check_text(names: Iterable[str], fields: Mapping[str, Any], path: Path) -> None:
    if not any(name.endswith("word_embeddings.weight") for name in names):
        target = shown(fields.get("target"))
        do = "Only language models are read."
        raise UnknownFormat(f"a model of NeMo without word embeddings (target: {target})", where=path, do=do)


def _read_index(path: Path, files: Files, backend: object) -> dcp_metadata.Index:
    """What `model_weights` holds, by the `sharded_backend` that wrote it."""

    def whole(name: str) -> Span:
        if (found := files.get(f"{_SHARDED}/{name}")) is None:
            raise DamagedCheckpoint(f"{_SHARDED}/{name} is missing", where=path, do="Is the copy whole?")
        return found

    if backend == "zarr":
        return dcp_metadata.Index(zarr.tensors_of(files, _SHARDED), {})
    if backend == "torch_dist":
        metadata = whole(dcp_metadata.FILE)
        return dcp_metadata.parse_index(metadata.read(), whole, metadata.path)
    raise UnknownFormat(f"weights of NeMo in {shown(backend)}", where=path, do="Known: torch_dist, zarr.")


def _read_ranks(path: Path, files: Files, fields: Mapping[str, Any]) -> tuple[Parallelism, list[Rank]]:
    """The state dicts of all ranks, as Megatron's with the arguments that the configuration says."""
    found: dict[tuple[int, int], Span] = {}
    for name, span in files.items():
        if match := _RANK.fullmatch(name):
            at = int(match[1] or 0), int(match[2] or 0)
            if at in found:
                what = f"{shown(name)} is a second file of tensor rank {at[0]}, pipeline rank {at[1]}"
                raise DamagedCheckpoint(what, where=path, do="Remove what another run has left.")
            found[at] = span
    if not found:
        raise DamagedCheckpoint(f"neither {_STATE} nor {_SHARDED} in it", where=path, do="Is the copy whole?")

    tensor, pipeline = (1 + max(numbers) for numbers in zip(*found, strict=True))
    sizes = (("tensor", tensor), ("pipeline", pipeline))
    configured = [fields.get(f"{kind}_model_parallel_size") or size for kind, size in sizes]
    if configured != [tensor, pipeline] or len(found) != tensor * pipeline:
        what = f"{counted(len(found), 'rank')} of tensor {shown(configured[0])} x pipeline {shown(configured[1])}"
        raise DamagedCheckpoint(what, where=path, do="Copy it again, from every machine that saved.")

    args = argparse.Namespace(**config.to_megatron_args(fields, f"{path}, {_CONFIG}"))
    ranks = []
    for at, span in sorted(found.items()):
        state = torch_zip.skeleton_at(span)
        if not isinstance(state, dict) or not all(type(name) is str for name in state):
            raise DamagedCheckpoint("it holds no state dict", where=span)
        model = by_model_names(((name, _PREFIX.sub("", name), value) for name, value in state.items()), span.path)
        ranks.append(Rank(*at, 0, span.path, {"args": args, "model": model}))
    return Parallelism(tensor, pipeline), ranks


def open_nemo(path: Path, hints: Hints = NO_HINTS) -> NemoSharded | NemoRanks:
    """A Reader for NeMo's checkpoint at `path`. Raises as `files_of` and the Readers do."""
    if _is_weights(path):
        what = f"the weights of a NeMo checkpoint without its {_CONFIG}"
        raise UnknownFormat(what, where=path, do=f"Give the directory above, {shlex.quote(str(above(path)))}")
    files = files_of(path)
    if of_ranks := [name for name in files if _RANK.fullmatch(name)]:
        if any(name.startswith(f"{_SHARDED}/") for name in files):
            what = f"two models, in {_SHARDED}/ and {of_ranks[0]}"
            raise DamagedCheckpoint(what, where=path, do="Which is meant? Leave the other out.")
    return (NemoSharded if f"{_SHARDED}/{MARKER}" in files else NemoRanks)(path, files, hints)


CONTAINER = Container(
    recognise, without_iterations(open_nemo), "model_config.yaml beside model_weights of NeMo 1, or *.nemo"
)
