"""Pickles from strangers, read with an allow-list: no name outside it is ever looked up.

A pickle is a program. `loads` runs it on a virtual machine whose only verbs are the callables that
the caller lists, so the worst a hostile file can do is to raise UnsafePickle or DamagedCheckpoint.
"""

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from precisionctl.errors import DamagedCheckpoint, UnsafePickle

Allowed = Mapping[tuple[str, str], Any]
"""(module, qualified name) as the pickle spells it -> what stands in for it here."""

Persistent = Callable[[Any], Any]
"""A persistent id (a storage of torch.save) -> what stands in for it here."""


def loads(data: bytes, allowed: Allowed, where: object, persistent: Persistent | None = None) -> Any:
    """The object that `data` pickles, built from nothing but `allowed` and plain containers.

    `where` names the source in errors. Raises UnsafePickle for a name outside `allowed` and
    DamagedCheckpoint for bytes that are no pickle.
    """
    try:
        return _AllowListUnpickler(data, allowed, where, persistent).load()
    except UnsafePickle:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DamagedCheckpoint(f"a pickle does not load: {error!r}", where=where) from error


class _AllowListUnpickler(pickle._Unpickler):
    """CPython's unpickler in Python. The one in C sizes its memo by the largest index, so that six bytes can ask
    for gigabytes, and its BUILD cannot be held back from changing what is allowed for everyone after this file."""

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch}
    del dispatch[pickle.BYTEARRAY8[0]]  # it fills as much memory as it names before it reads a byte

    def load_build(self) -> None:
        changed = self.stack[-2]  # type: ignore[attr-defined]
        if callable(changed):
            raise UnsafePickle(f"a pickle changes {changed!r}, a class or function", where=self._where)
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build

    def __init__(self, data: bytes, allowed: Allowed, where: object, persistent: Persistent | None) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed
        self._where = where
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._allowed[module, name]
        except KeyError:
            raise UnsafePickle(
                f"a pickle asks for {module}.{name}, which is not on the allow-list",
                where=self._where,
                do="Nothing was executed. If you trust the file, report the name as missing.",
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("it refers to something outside itself")
        return self._persistent(pid)
