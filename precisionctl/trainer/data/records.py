"""Records of data, and where they come from."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Record(NamedTuple):
    """One row of a file by its keys, and where it is, for errors: `chats.jsonl, line 7`."""

    where: str
    row: Mapping[str, Any]


@dataclass(frozen=True)
class DataSource:
    """Data, wherever it is; `name` is what the user called it. `records` reads all of it, lazily; what it yields
    changes only if `identity`, JSON, does. `nbytes` is its size, 0 where that is not known; `notes` are for the
    user."""

    name: str
    records: Callable[[], Iterator[Record]]
    identity: object
    nbytes: int = 0
    notes: tuple[str, ...] = ()
