"""Archives of `torch.save` that are whole in memory, read with an allow-list as safe_pickle reads pickles.

An archive is a ZIP file of stored entries: `data.pkl` pickles the object and names its storages, each an entry
`data/<name>`. What is large and in files is `checkpoints/torch_zip.py`'s.
"""

import io
import zipfile
from typing import IO, Any

import torch
from torch import Tensor

from precisionctl.errors import damage, shown
from precisionctl.untrusted import safe_pickle
from precisionctl.untrusted.safe_pickle import finite

MAGIC = b"PK\3\4"
WHAT = "not what torch.save writes"


def loads(data: bytes, allowed: safe_pickle.Allowed, where: object) -> Any:
    """The object that torch.save wrote as `data`, built from `allowed`, which is given each storage as a flat tensor.

    Raises UnsafePickle and DamagedCheckpoint, as safe_pickle.loads; no more is read than there are bytes.
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
                    raise ValueError("its storages lie in one another")
                storages[key] = elements(archive.read(entry), dtype)
            return storages[key]

        pickled = archive.read(stored(archive, f"{root}/data.pkl"))
        return finite(safe_pickle.loads(pickled, allowed, where, storage))


def reference_of(identifier: Any) -> tuple[torch.dtype, str]:
    """dtype and name of the storage that ("storage", dtype, name, device, elements) stands for. Raises ValueError."""
    _, dtype, name, *_ = identifier
    if not isinstance(dtype, torch.dtype) or type(name) is not str:
        raise ValueError(f"{shown(identifier)} as a storage")
    return dtype, name


def elements(data: bytes, dtype: torch.dtype) -> Tensor:
    """Bytes as a flat tensor of its own."""
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def stored(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    """An entry whose bytes stand in the archive as they are. Raises KeyError and ValueError."""
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
        raise ValueError(f"{name} is compressed")
    return entry


def directory(file: IO[bytes] | io.RawIOBase) -> tuple[zipfile.ZipFile, str]:
    """An archive's directory, and the folder that torch.save put all its entries in.

    Raises ValueError where there is more than one way to read it: readers of ZIP files differ in which of two
    directories, or of two entries of one name, they believe.
    """
    archive = zipfile.ZipFile(file)
    names = archive.namelist()
    if len(set(names)) < len(names):
        raise ValueError("two entries have one name")
    if archive.comment or min(entry.header_offset for entry in archive.infolist()) != 0:
        raise ValueError("something stands before or behind the archive")
    return archive, names[0].split("/")[0]
