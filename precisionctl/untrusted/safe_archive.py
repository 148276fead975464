"""Load archives of `torch.save` from memory with an allow-list, as safe_pickle loads pickles.

An archive is a ZIP file of uncompressed entries: `data.pkl` pickles the object and names its storages, each an entry
`data/<name>`. Large archives in files are read by `checkpoints/torch_files/torch_zip.py`.
"""

from __future__ import annotations

import io
import zipfile
from typing import IO, TYPE_CHECKING, Any

from precisionctl.dtypes import DType
from precisionctl.errors import damage, shown
from precisionctl.torch_when_used import torch
from precisionctl.untrusted import safe_pickle
from precisionctl.untrusted.safe_pickle import finite, is_count

if TYPE_CHECKING:
    from torch import Tensor

MAGIC = b"PK\3\4"
WHAT = "not what torch.save writes"


def loads(data: bytes, allowed: safe_pickle.Allowed, where: object) -> Any:
    """The object that torch.save wrote as `data`, made with `allowed`, whose callables get storages as flat tensors.

    Raises UnsafePickle and DamagedCheckpoint, as `safe_pickle.loads`. Storages together are not larger than `data`.
    """
    with damage(WHAT, where):
        archive, root = directory(io.BytesIO(data))
        storages: dict[str, Tensor] = {}
        left = len(data)

        def storage(reference: Any) -> Tensor:
            nonlocal left
            dtype, key = reference_of(reference)
            if key not in storages:
                entry = stored(archive, f"{root}/data/{key}")
                left -= entry.file_size
                if left < 0:
                    raise ValueError("its storages overlap")
                storages[key] = elements(archive.read(entry), dtype.torch)
            return storages[key]

        pickled = archive.read(stored(archive, f"{root}/data.pkl"))
        return finite(safe_pickle.loads(pickled, allowed, where, storage))


def reference_of(identifier: Any) -> tuple[DType, str]:
    """dtype and name of a storage from its persistent id, ("storage", dtype, name, device, elements). LitGPT writes the
    name as a number. Raises ValueError for anything else."""
    _, dtype, name, *_ = identifier
    name = str(name) if is_count(name) else name
    if not isinstance(dtype, DType) or type(name) is not str:
        raise ValueError(f"{shown(identifier)} as a storage")
    return dtype, name


def elements(data: bytes, dtype: torch.dtype) -> Tensor:
    """Bytes as a flat tensor with its own memory."""
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def stored(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    """An uncompressed entry of an archive. Raises KeyError if it is not there, ValueError if it is compressed."""
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
        raise ValueError(f"{name} is compressed")
    return entry


def directory(file: IO[bytes] | io.RawIOBase) -> tuple[zipfile.ZipFile, str]:
    """An open archive, and the name of the folder that all its entries are in.

    Raises ValueError for an archive that can be read in more than one way: programs differ in which of two directories,
    or of two entries with one name, they use.
    """
    archive = zipfile.ZipFile(file)
    names = archive.namelist()
    if len(set(names)) < len(names):
        raise ValueError("two entries have one name")
    if archive.comment or min(entry.header_offset for entry in archive.infolist()) != 0:
        raise ValueError("something stands before or behind the archive")
    return archive, names[0].split("/")[0]
