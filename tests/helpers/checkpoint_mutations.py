"""Every place in a checkpoint that can be changed: one bit of each stored tensor, each key of its config.json."""

import json
import math
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.gguf.head import read_head
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint


@dataclass(frozen=True)
class Stored:
    """Bytes of a tensor: `size` of them in a file from `offset` on, `itemsize` for an element, `columns` in a row."""

    name: str
    file: Path
    offset: int
    size: int
    itemsize: int


def stored_tensors(directory: Path) -> Iterator[Stored]:
    """Everything that is stored as tensors: the model's, an optimizer's, and what is in files beside."""
    reader = open_checkpoint(directory)
    yield from _hf_tensors(reader) if isinstance(reader, HuggingFaceReader) else _megatron_tensors(reader)
    for file in sorted(directory.rglob("precisionctl/*.safetensors")):
        yield from _of_safetensors(file)


def _hf_tensors(reader: HuggingFaceReader) -> Iterator[Stored]:
    for name, (file, stored) in reader.stored.places.items():
        if "[" not in name or name.endswith("[0]"):
            yield Stored(name, file, stored.offset, stored.spec.nbytes, stored.spec.dtype.itemsize)


def _megatron_tensors(reader: Reader) -> Iterator[Stored]:
    for name in (*reader.specs, *getattr(reader, "optimizer_specs", {})):
        chunk = reader.chunks(name)[0]
        spec = reader.specs.get(name) or reader.optimizer_specs[name]  # type: ignore[attr-defined]
        assert isinstance(chunk.place, Path)
        yield Stored(name, chunk.place, chunk.offset, chunk.box.elements * spec.dtype.itemsize, spec.dtype.itemsize)


def _of_safetensors(file: Path) -> Iterator[Stored]:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    for name, said in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = said["data_offsets"]
            itemsize = (end - begin) // max(1, math.prod(said["shape"]))
            yield Stored(f"{file.name} {name}", file, 8 + length + begin, end - begin, itemsize)


def in_files(directory: Path) -> Iterator[Stored]:
    """The tensors in files of safetensors, GGUF and torch.save, whatever any Reader takes of them. Of torch.save's,
    whose dtypes only a pickle says, each byte is an element."""
    for file in sorted(each for each in directory.rglob("*") if each.is_file()):
        if file.suffix == ".safetensors":
            yield from _of_safetensors(file)
        elif file.suffix == ".gguf":
            for name, tensor in read_head(file).tensors.items():
                itemsize = tensor.format.dtype.itemsize if tensor.format.dtype else 1
                yield Stored(f"{file.name} {name}", file, tensor.offset, tensor.nbytes, itemsize)
        elif zipfile.is_zipfile(file):
            yield from _of_torch(file)


def _of_torch(file: Path) -> Iterator[Stored]:
    with zipfile.ZipFile(file) as archive, open(file, "rb") as data:
        for record in archive.infolist():
            if "/data/" in record.filename and record.file_size:
                data.seek(record.header_offset + 26)  # of its name's length, and of what comes between
                begin = record.header_offset + 30 + sum(struct.unpack("<HH", data.read(4)))
                yield Stored(f"{file.name} {record.filename}", file, begin, record.file_size, 1)


@contextmanager
def flipped(tensor: Stored, element: int, bit: int) -> Iterator[None]:
    """One bit of one element is another one meanwhile."""
    at = tensor.offset + element * tensor.itemsize + bit // 8
    with open(tensor.file, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit % 8)]))
    try:
        yield
    finally:
        with open(tensor.file, "r+b") as file:
            file.seek(at)
            file.write(bytes([byte]))


def leaves(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where values are in a JSON object, at any depth; a list is one."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def other(value: Any) -> Any:
    """A value of the same kind that is not the same."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value * 1.5 + 0.25
        case str():
            return {"silu": "gelu", "gelu": "relu"}.get(value, f"{value}x")
        case list():
            return [*value[:-1], other(value[-1])] if value else [1]
        case None:
            return 3
        case _:
            return {"x": 1}


def changed_configs(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The config with each value another, then each not there, then one more; with a name for what was changed."""
    for path in leaves(config):
        for left_out in (False, True):
            made = deepcopy(config)
            holder = made
            for key in path[:-1]:
                holder = holder[key]
            if left_out:
                del holder[path[-1]]
            else:
                holder[path[-1]] = other(holder[path[-1]])
            yield f"{'.'.join(path)}{' left out' if left_out else ''}", made
    yield "one more", config | {"temperature_of_the_softmax": 2.0}


def cache_scales(layers: int) -> dict[str, torch.Tensor]:
    """Scales of keys and values, as compressed-tensors names them."""
    return {
        f"model.layers.{layer}.self_attn.{kind}_scale": torch.tensor([0.01 + 0.005 * layer + (kind == "v") * 0.002])
        for layer in range(layers)
        for kind in ("k", "v")
    }
