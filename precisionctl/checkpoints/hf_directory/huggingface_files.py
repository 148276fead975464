"""The weight files of a Hugging Face directory: safetensors or torch.save's `.bin`, one file or shards and an index."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.chunks import Chunk, whole
from precisionctl.checkpoints.hf_directory.fused_experts import sliced, stacked, stored_name, stored_tensor
from precisionctl.checkpoints.hf_directory.safetensors_file import (
    LONGEST_NAME,
    Places,
    StoredTensor,
    make_header,
    read_header,
    split_shards,
)
from precisionctl.checkpoints.output import FileLayout
from precisionctl.checkpoints.torch_files import torch_zip, torch_zip_writer
from precisionctl.errors import DamagedCheckpoint, shown
from precisionctl.param import TensorSpec
from precisionctl.sizes import listed
from precisionctl.untrusted.safe_files import check_link, has_file, read_json

MAX_SHARD_SIZE = 5_000_000_000


@dataclass(frozen=True)
class WeightFileFormat:
    """A file format for weights. `read` finds the tensors of a file, `lay_out` places them in a new one."""

    name: str
    stem: str
    suffix: str
    read: Callable[[Path], dict[str, StoredTensor]]
    lay_out: Callable[[Mapping[str, TensorSpec]], FileLayout[str]]

    @property
    def single(self) -> str:
        return self.stem + self.suffix

    @property
    def index(self) -> str:
        return f"{self.single}.index.json"

    def shard(self, number: int, count: int) -> str:
        """The file name of a shard, counted from 1."""
        return self.single if count == 1 else f"{self.stem}-{number:05}-of-{count:05}{self.suffix}"


def _lay_out_safetensors(specs: Mapping[str, TensorSpec], written_for: str = "pt") -> FileLayout[str]:
    header, offsets = make_header(specs, {"format": written_for})
    return FileLayout(((0, header),), offsets, len(header) + sum(spec.nbytes for spec in specs.values()))


def _lay_out_bin(specs: Mapping[str, TensorSpec]) -> FileLayout[str]:
    blanks = {name: torch_zip_writer.Blank(spec.dtype, spec.shape) for name, spec in specs.items()}
    archive = torch_zip_writer.lay_out(blanks)
    return FileLayout(archive.pieces, {name: archive.holes[blank] for name, blank in blanks.items()}, archive.length)


def read_bin(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a `.bin` file. Raises as `contiguous`, DamagedCheckpoint and UnsafePickle; no data is read.

    Tensors may share bytes, as those of tied embeddings do.
    """
    return tensors_of(torch_zip.skeleton(path), path)


def tensors_of(saved: Any, path: Path) -> dict[str, StoredTensor]:
    """The tensors of a state dict that `skeleton` found in a file. Raises DamagedCheckpoint for anything else."""
    if not isinstance(saved, dict):
        raise DamagedCheckpoint("it does not hold a dict of tensors", where=path)
    found = {}
    for name, tensor in saved.items():
        if type(name) is not str:
            do = "Only weights are read. Save the model again with transformers."
            raise DamagedCheckpoint(f"{shown(name)} as a name", where=path, do=do)
        if len(name) > LONGEST_NAME:
            raise DamagedCheckpoint(f"a name of {len(name)} letters, more than {LONGEST_NAME}", where=path)
        located = torch_zip.contiguous(tensor, name, path)
        found[name] = StoredTensor(TensorSpec(located.shape, located.dtype), located.offset)
    return found


SAFETENSORS = WeightFileFormat("safetensors", "model", ".safetensors", read_header, _lay_out_safetensors)
MLX_SAFETENSORS = replace(SAFETENSORS, lay_out=partial(_lay_out_safetensors, written_for="mlx"))
BIN = WeightFileFormat("bin", "pytorch_model", ".bin", read_bin, _lay_out_bin)


def file_format_of(directory: Path) -> WeightFileFormat | None:
    """The format of a directory's weights; None if there are none. Safetensors if there are both, as transformers
    chooses."""
    for file_format in (SAFETENSORS, BIN):
        if (directory / file_format.index).is_file() or (directory / file_format.single).is_file():
            return file_format
    return SAFETENSORS if any(unindexed(directory, SAFETENSORS)) else None


def unindexed(directory: Path, file_format: WeightFileFormat) -> list[Path]:
    """The files of weights of a directory without an index, as transformers reads them: one, of which others
    (consolidated.safetensors) hold copies. An adapter's are none."""
    single = directory / file_format.single
    if single.is_file():
        return [single]
    return sorted(file for file in directory.glob(f"*{file_format.suffix}") if file.stem != "adapter_model")


def read_stored(directory: Path, file_format: WeightFileFormat) -> dict[Path, dict[str, StoredTensor]]:
    """The tensors of each file, as stored. Raises DamagedCheckpoint where index and files contradict each other, or
    shards are missing."""
    weight_map = _weight_map(directory, file_format)
    files = sorted(set(weight_map.values())) or unindexed(directory, file_format)
    if not weight_map:  # files that say that they are some of several
        counts = Counter(match[1] for file in files if (match := re.search(r"-\d{5}-of-(\d{5})\.", file.name)))
        for several, count in counts.items():
            if count != int(several):
                what = f"{count} of {int(several)} files of weights, and no index of them"
                raise DamagedCheckpoint(what, where=directory, do="Download the others again.")
    found: dict[Path, dict[str, StoredTensor]] = {}
    for file in files:
        check_link(file, directory)
        if not file.is_file():
            raise DamagedCheckpoint("not a file", where=file, do="Download it again.")
        found[file] = file_format.read(file)
    for name, file in weight_map.items():
        if name not in found[file]:
            what = f"{file_format.index} says that `{name}` is in {file.name}, but it is not"
            raise DamagedCheckpoint(what, where=directory)
    return found


def places_in(files: Mapping[Path, Mapping[str, StoredTensor]]) -> Places:
    """The logical tensors of files, by name, with the file that each is in. Raises as `sliced`, and DamagedCheckpoint
    for a name that two files have."""
    found: Places = {}
    for file, tensors in files.items():
        for name, stored in sliced(tensors, file).items():
            if name in found:
                raise DamagedCheckpoint(
                    f"`{name}` is in {found[name][0].name} too", where=file, do="Download the directory again."
                )
            found[name] = (file, stored)
    return found


def _weight_map(directory: Path, file_format: WeightFileFormat) -> dict[str, Path]:
    """Tensor name to file, from the index; empty without one."""
    index, single = directory / file_format.index, directory / file_format.single
    if not has_file(index, directory):
        return {}
    weight_map = read_json(index, directory).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedCheckpoint("no `weight_map`", where=index)
    for file in weight_map.values():
        if not isinstance(file, str) or os.path.basename(file) != file or file in ("", os.curdir, os.pardir):
            raise DamagedCheckpoint(
                f"{file!r} is not the name of a file in this directory", where=index, do="Do not trust it."
            )
    files = {file: directory / file for file in dict.fromkeys(weight_map.values())}
    missing = sorted(file for file, path in files.items() if not os.path.exists(path))  # nor can all be a file's name
    if single.is_file() and single.name not in files:
        raise DamagedCheckpoint(
            f"{single.name} and {index.name} are two models: transformers reads the first, engines the second"
            + (f", whose {missing[0]} is missing" if missing else ""),
            where=directory,
            do=f"Remove {index.name} if {single.name} is the model." if missing else "Move one of them away.",
        )
    if missing:
        some = f"{len(missing)} of {len(files)} shards are missing: {listed(missing)}"
        what, do = (f"shard {missing[0]} is missing", "it") if len(missing) == 1 else (some, "them")
        raise DamagedCheckpoint(what, where=directory, do=f"Download {do} again.")
    return {name: files[file] for name, file in weight_map.items()}


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of a directory that is being written: of tensors `specs`, by logical name."""

    directory: Path
    specs: Mapping[str, TensorSpec]
    max_shard_size: int = MAX_SHARD_SIZE
    file_format: WeightFileFormat = SAFETENSORS

    @cached_property
    def _shards(self) -> dict[Path, dict[str, TensorSpec]]:
        shards = split_shards(
            stacked(dict(stored_tensor(name, spec) for name, spec in self.specs.items())), self.max_shard_size
        )
        count = len(shards)
        return {self.directory / self.file_format.shard(number, count): shard for number, shard in enumerate(shards, 1)}

    @cached_property
    def _places(self) -> dict[str, Chunk]:
        starts = {
            name: (file, offset)
            for file, shard in self._shards.items()
            for name, offset in self.file_format.lay_out(shard).holes.items()
        }
        places = {}
        for name, spec in self.specs.items():
            stored, index = stored_name(stored_tensor(name, spec)[0])
            file, offset = starts[stored]
            places[name] = Chunk(whole(spec), file, offset + (index or 0) * spec.nbytes)
        return places

    def lay_out(self) -> None:
        """Create every file at its final size, with everything but the tensors' bytes. Tensors in existing files are
        not changed."""
        for file, shard in self._shards.items():
            self.file_format.lay_out(shard).write_around(file)

    def chunks(self, name: str) -> Sequence[Chunk]:
        return [self._places[name]]

    def write_index(self, *, of_one: bool = False) -> None:
        """Write which tensor is in which file, where there are several, or `of_one` too."""
        if of_one or len(self._shards) > 1:
            total = sum(spec.nbytes for shard in self._shards.values() for spec in shard.values())
            weight_map = {name: file.name for file, shard in self._shards.items() for name in shard}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            content = (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
            (self.directory / self.file_format.index).write_bytes(content)
