"""Archives of `torch.save` that are whole in memory, read with an allow-list as safe_pickle reads pickles.

An archive is a ZIP file of stored entries: `data.pkl` pickles the object and names its storages, each an entry
`data/<name>`. What is large and in files is `checkpoints/torch_zip.py`'s.
"""

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from precisionctl import safe_pickle
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError, shown

MAGIC = b"PK\3\4"


def loads(data: bytes, allowed: safe_pickle.Allowed, where: object) -> Any:
    """The object that torch.save wrote as `data`, built from `allowed`, which is given each storage as a flat tensor.

    Raises UnsafePickle and DamagedCheckpoint, as safe_pickle.loads; no more is read than there are bytes.
    """
    with damage(where):
        archive = zipfile.ZipFile(io.BytesIO(data))
        root = archive.namelist()[0].split("/")[0]
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

        return safe_pickle.loads(archive.read(stored(archive, f"{root}/data.pkl")), allowed, where, storage)


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


@contextmanager
def damage(where: object) -> Iterator[None]:
    """Whatever a damaged archive makes Python raise, as DamagedCheckpoint."""
    try:
        yield
    except PrecisionctlError:
        raise
    except Exception as error:
        raise DamagedCheckpoint(f"not what torch.save writes: {error}", where=where, do="Is the copy whole?") from error
