"""Where Orbax has a state in a directory, and what it holds.

`CheckpointManager` makes a directory for each step, and in it one for each item; MaxText's state is `items`. In an item
is `_METADATA`, which names all arrays. Their chunks are in OCDBT, or in files of their own.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.base import no_iterations
from precisionctl.checkpoints.orbax import ocdbt
from precisionctl.checkpoints.orbax.zarr_array import ZarrArray, arrays_of
from precisionctl.checkpoints.orbax.zstd_pieces import Value
from precisionctl.checkpoints.torch_files.torch_zip import Span
from precisionctl.errors import CheckpointError, DamagedCheckpoint, damage
from precisionctl.untrusted.safe_files import check_link, has_file, read_json

METADATA = "_METADATA"
_ITEMS = ("items", "default", "state")
"""MaxText's item; that of a manager with one item; and that of MaxText's emergency checkpoints."""


def item_in(path: Path) -> Path | None:
    """A step's item, which a path may be itself; None if it is neither."""
    for item in (path, *(path / name for name in _ITEMS)):
        if any((item / name).is_file() for name in (METADATA, ocdbt.MANIFEST)):
            return item
    return None


def steps_in(path: Path) -> dict[int, Path]:
    """The steps in a directory of some: the item of each. Steps that are not complete have other names."""
    inside = path.iterdir() if path.is_dir() else ()
    named = {int(one.name): one for one in inside if one.name.isascii() and one.name.isdecimal() and len(one.name) < 16}
    return {number: item for number, one in named.items() if (item := item_in(one))}


def item_directory(path: Path, iteration: int | None) -> Path:
    """The item of a step's directory, or in a directory of several that of the newest step, or of `iteration`. Raises
    CheckpointError where it is not there, and DamagedCheckpoint for links that lead out."""
    item = item_in(path)
    if item is None or iteration is not None:
        steps = steps_in(path)
        if not steps:
            raise no_iterations(path)
        wanted = max(steps) if iteration is None else iteration
        if wanted not in steps:
            do = f"Steps that are there: {', '.join(map(str, sorted(steps)[-10:]))}."
            raise CheckpointError(f"step {wanted} is not there", where=path, do=do)
        item = steps[wanted]
    check_link(item, path)
    return item


def read_tree(item: Path) -> tuple[dict[str, ZarrArray], set[Path]]:
    """The arrays of an item by name, the keys of dicts and the numbers in lists with dots between; and the files that
    hold their chunks. Raises DamagedCheckpoint for an array that is missing, or a part of one, and as `ocdbt.read_keys`
    and `arrays_of`."""
    about: Mapping[str, Any] = {}
    if has_file(item / METADATA, item):
        about = read_json(item / METADATA, item)
    of_ocdbt = has_file(item / ocdbt.MANIFEST, item)
    values = ocdbt.read_keys(item) if of_ocdbt else _files_in(item)
    # A key that is missing from a B+tree was never there; a file may have been lost
    arrays = arrays_of(values, filled=of_ocdbt and about.get("store_array_data_equal_to_fill_value") is not True)
    with damage("not the metadata of Orbax", item / METADATA):
        for leaf in about.get("tree_metadata", {}).values():
            name = ".".join(str(key["key"]) for key in leaf["key_metadata"])
            stored = leaf["value_metadata"]
            apart = stored["skip_deserialize"] or stored["value_type"] == "string"
            if not apart and name not in arrays:
                what = f"`{name}` is in {METADATA}, and its array is not there"
                raise DamagedCheckpoint(what, where=item, do="Is the copy whole?")
    for array in arrays.values():
        missing = None if array.filled else next((key for key in array.shards if key not in values), None)
        if missing is not None:
            what = f"a part of `{array.name}` is missing"
            raise DamagedCheckpoint(what, where=f"{item}, {missing}", do="Is the copy whole?")
    spans = {value.path for value in values.values() if isinstance(value, Span)}
    return arrays, spans or {item / ocdbt.MANIFEST}


def _files_in(item: Path) -> dict[str, Value]:
    """The files of arrays that are a directory each, as a key-value store."""
    found: dict[str, Value] = {}
    for folder, folders, files in os.walk(item):
        if Path(folder) == item:
            files = []
        for name in files:
            path = Path(folder, name)
            if len(found) >= ocdbt.MOST_KEYS:
                raise DamagedCheckpoint(f"more than {ocdbt.MOST_KEYS} files", where=item)
            if has_file(path, item):
                found[path.relative_to(item).as_posix()] = Span(path, 0, path.stat().st_size)
        for name in folders:
            check_link(Path(folder, name), item)
    return found
