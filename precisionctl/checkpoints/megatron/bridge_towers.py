"""The towers that Megatron-Bridge saved with a text model, by the names that they have in a plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from precisionctl.architectures.config_keys import Config
from precisionctl.architectures.towers_in_bridge import (
    ONCE,
    OPTIONAL_PARTS,
    TALKERS,
    TENSORS_OF_TOWERS,
    BridgeRow,
    Order,
    in_bridge,
)
from precisionctl.architectures.wrappers import TOWERS
from precisionctl.checkpoints.chunks import Chunk, Chunked, cut_into_runs, whole
from precisionctl.checkpoints.computed_rows import TransposedRows
from precisionctl.errors import DamagedCheckpoint, RecipeError, shown
from precisionctl.param import TensorSpec
from precisionctl.untrusted.safe_json import mapping_or_empty

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


class BridgeTowers:
    """The towers among the tensors that a run of Bridge `stored`, by the table `towers_in_bridge`, and those `beside`
    it that the run had no module for: so they were not trained either. Names are spelled as those beside are, if there
    are any, else as in published files.

    `own` are the stored tensors that are towers, and `lacking` the names of those from beside. Raises DamagedCheckpoint
    for shapes that the row, config.json or those beside do not fit, and for values that are not floating-point;
    RecipeError for towers beside that are another model's.
    """

    def __init__(self, stored: Chunked, config: Config, beside: Chunked, where: Path) -> None:
        self._stored, self._config, self._beside, self._where = stored, config, beside, where
        self._orders: Callable[[Order, int], list[NDArray[np.int64]]]
        self._orders = lru_cache(maxsize=8)(lambda order, rows: order(np.arange(rows), config))  # layers share them
        self._chunks: dict[str, tuple[Chunk, ...]] = {}
        self._moved: dict[str, tuple[str, BridgeRow, int]] = {}
        """For each tensor the stored one that it is made of, and which of the tensors in that one's row it is."""
        self._published: dict[str, TensorSpec] = {}
        specs: dict[str, TensorSpec] = {}
        for bridge, spec in stored.specs.items():
            if (found := in_bridge(config["model_type"], bridge)) is None:
                continue
            row, published = found
            for part, (hf, shape) in enumerate(zip(published, self._shapes(row, bridge, spec), strict=True)):
                name = _spelled(TOWERS + hf, beside.specs)
                if name in specs:
                    raise DamagedCheckpoint(f"`{name}` is there twice", where=where)
                if (other := beside.specs.get(name)) and other.shape != shape:
                    what = f"`{bridge}` is {list(shape)} in Hugging Face, and the reference's {list(other.shape)}"
                    raise DamagedCheckpoint(what, where=where, do="Is the reference this model's?")
                is_count = name.endswith(".num_batches_tracked")  # of a batch norm's steps
                if not (spec.dtype.is_floating_point or is_count) or spec.is_codes:
                    raise DamagedCheckpoint(f"`{bridge}` is {spec.dtype}", where=where)
                specs[name], self._moved[name] = TensorSpec(shape, spec.dtype), (bridge, row, part)
                self._published[hf] = specs[name]
        self.own: Collection[str] = {of for of, _, _ in self._moved.values()}
        self.lacking = tuple(name for name in beside.specs if name not in specs)
        if specs and beside.specs and len(self.lacking) == len(beside.specs):
            mine, theirs = (name.removeprefix(TOWERS) for name in (min(specs), self.lacking[0]))
            what = f"the reference's towers have other names than the checkpoint's: `{theirs}`, not `{mine}`"
            raise RecipeError(what, where=where, do="Give the model that the run began with.")
        self.specs: Mapping[str, TensorSpec] = {**specs, **{name: beside.specs[name] for name in self.lacking}}

    def check(self, described: Config) -> None:
        """Raise DamagedCheckpoint if the run's towers lack a tensor or a layer that all have, or a tensor in a layer
        that another one has; and if config.json says other sizes than they have, or than `described`, which is what the
        run says of its towers in the form of config.json's parts. Raise RecipeError if config.json says that the model
        speaks, and nothing beside the run does."""
        for part, of_run in described.items():  # no shape says how many heads there are
            said = _part_of(self._config, part) or {}
            for key in sorted(of_run.keys() & said.keys()):
                size = of_run[key]
                is_size = type(size) is int or (isinstance(size, list) and all(type(each) is int for each in size))
                if is_size and said[key] != size and not key.endswith("token_id"):
                    what = f"{part}.{key} of config.json is {shown(said[key])}, and the run had {shown(size)}"
                    raise DamagedCheckpoint(what, where=self._where, do="Is config.json this model's?")
        _check_layers(self._published, self._where)
        _check_tensors(self._published, self._config, self._where)
        talker = TALKERS.get(self._config["model_type"])
        speaks = talker and self._config.get("enable_audio_output") is not False
        if speaks and not any(name.startswith(f"{TOWERS}{talker}") for name in self._beside.specs):
            what = f"Megatron-Bridge does not train what speaks (`{talker}`), and the reference has no weights of it"
            do = "Give a reference with all weights, or one whose config.json says enable_audio_output: false."
            raise RecipeError(what, where=self._where, do=do)

    def chunks(self, name: str) -> Sequence[Chunk]:
        if name not in self._moved:
            return self._beside.chunks(name)
        if name in self._chunks:
            return self._chunks[name]
        bridge, row, part = self._moved[name]
        spec = self.specs[name]
        if row.transposed:  # whose chunks are looked for when rows are read: that opens files
            found = [Chunk(whole(spec), TransposedRows(self._stored, bridge))]
        elif row.order is None:
            found = [*self._stored.chunks(bridge)]
        else:
            stored = self._stored.chunks(bridge)
            order = self._orders(row.order, self._stored.specs[bridge].rows)[part]
            found = [
                Chunk(box, stored[number].place, stored[number].offset + skipped * spec.dtype.itemsize)
                for number, box, skipped in cut_into_runs([chunk.box for chunk in stored], _runs(order))
            ]
        self._chunks[name] = tuple(found)
        return self._chunks[name]

    def _shapes(self, row: BridgeRow, bridge: str, spec: TensorSpec) -> list[tuple[int, ...]]:
        """The shapes of a stored tensor's parts in Hugging Face."""
        fits = len(spec.shape) == 2 if row.transposed else not row.order or 0 < spec.rows <= _MOST_ROWS
        if not fits or (row.order and not spec.shape):
            raise DamagedCheckpoint(f"`{bridge}` is {list(spec.shape)}", where=self._where)
        if row.order:
            try:
                return [(len(order), *spec.shape[1:]) for order in self._orders(row.order, spec.rows)]
            except DamagedCheckpoint as error:
                raise DamagedCheckpoint(f"`{bridge}`: {error.what}", where=self._where, do=error.do) from None
        return [spec.shape[::-1] if row.transposed else spec.shape]


def _part_of(config: Config, part: str) -> Config | None:
    """The object in config.json with this dotted name; None where there is none."""
    found: object = config
    for key in part.split("."):
        found = mapping_or_empty(found).get(key)
    return found if isinstance(found, Mapping) else None


def _check_tensors(specs: Mapping[str, TensorSpec], config: Config, where: Path) -> None:
    """Raise DamagedCheckpoint if towers, by their published names, lack a tensor that all of the kind have, do not have
    as many layers as config.json says, have another width, or what hears where config.json says of none."""
    do = "Is config.json this model's? If it is, copy the checkpoint again, or save it again."
    there: set[str] = set()
    absent: set[str] = set()
    for key, tensors in TENSORS_OF_TOWERS[config["model_type"]].items():
        part, _, last = key.rpartition(".")
        sizes = {} if key == ONCE else _part_of(config, part)
        if sizes is None:
            if part in OPTIONAL_PARTS:
                absent |= {_module(tensor) for tensor in tensors}
                continue
            raise DamagedCheckpoint(f"config.json has no {part}", where=where, do="Is config.json this model's?")
        there |= {_module(tensor) for tensor in tensors}
        count = None if key == ONCE else _count(sizes.get(last), key, where)
        width = next((sizes[size] for size in _WIDTHS if size in sizes), None)
        for tensor in tensors:
            pattern = re.compile(re.escape(tensor).replace(r"\*", r"(\d+)"))
            found = {match.groups(): specs[match[0]] for match in map(pattern.fullmatch, specs) if match}
            if not found and count != 0:
                what = f"there is no `{tensor}`, which all towers of a `{config['model_type']}` have"
                raise DamagedCheckpoint(what, where=where, do=do)
            if "*" not in tensor:
                continue
            if count is not None and len(found) != count:
                what = f"{len(found)} layers have `{tensor}`, and {key} of config.json says {count}"
                raise DamagedCheckpoint(what, where=where, do=do)
            if lost := [number for number in range(len(found)) if (str(number),) not in found]:
                raise DamagedCheckpoint(f"there is no `{tensor.replace('*', str(lost[0]))}`", where=where, do=do)
            # a list: what config.json says of the width may be a list too, which has no hash
            shapes = [*{spec.shape for spec in found.values()}]
            if width is not None and tensor.endswith(_OF_WIDTH) and shapes != [(width,)]:
                what = f"`{tensor}` has not the {shown(width)} numbers that {part} says"
                raise DamagedCheckpoint(what, where=where, do=do)
    if beyond := [name for name in specs if _module(name) in absent - there]:
        what = f"`{beyond[0]}` is part of what hears, and config.json has no {' or '.join(OPTIONAL_PARTS)}"
        raise DamagedCheckpoint(what, where=where, do="Is config.json this model's?")


def _module(name: str) -> str:
    """The outermost module of a tower that a tensor is in."""
    return name.removeprefix("model.").split(".")[0]


_WIDTHS = ("width", "vt_hidden_size", "hidden_size", "d_model")
"""What parts of config.json call the width of a tower, in published files first (Step 3.7, Kimi K2.5)."""

_OF_WIDTH = (
    ".norm0.weight",
    ".norm1.weight",
    ".layer_norm1.weight",
    ".ln_1.weight",
    ".attention_norm.weight",
    ".input_layernorm.weight",
    ".norm_pre_attn.weight",
    ".norm_self_att.weight",
    "_attn_layer_norm.weight",
)
"""The norm that a layer of a tower begins with."""


def _count(said: object, key: str, where: Path) -> int | None:
    """How many layers config.json says; None where it does not. Raises DamagedCheckpoint for no number of layers."""
    if isinstance(said, list):
        return len(said)
    if said is not None and not (type(said) is int and said > 0):
        raise DamagedCheckpoint(f"{key} of config.json is {shown(said)}", where=where)
    return said


_OF_LAYER = re.compile(r"(.*?\.)(\d+)(\..+)")


def _check_layers(names: Iterable[str], where: Path) -> None:
    """Raise DamagedCheckpoint if a tower's layer lacks a tensor that another one has: the run had a module for it. All
    modules that are called by numbers are layers here, whatever they are in: those in a sequence are alike, too."""
    layers: dict[str, dict[str, set[str]]] = {}
    for before, number, behind in (match.groups() for match in map(_OF_LAYER.fullmatch, names) if match):
        layers.setdefault(before, {}).setdefault(behind, set()).add(number)
    for before, tensors in layers.items():
        numbers = set().union(*tensors.values())
        for behind, there in tensors.items():
            if missing := numbers - there:
                what = f"`{before}{min(missing)}{behind}` is missing, which other layers have"
                raise DamagedCheckpoint(what, where=where, do="Copy the checkpoint again, or save it again.")


_MOST_ROWS = 1 << 17
"""More than any tower's linear has. A file from a stranger may say more, and NumPy would take the memory."""


def _runs(order: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive numbers: where each begins, its first number, and how many there are."""
    edges = [0, *(np.flatnonzero(np.diff(order) != 1) + 1).tolist(), len(order)]
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        yield begin, int(order[begin]), end - begin


def _spelled(published: str, beside: Collection[str]) -> str:
    """A published name as the towers beside the checkpoint have it: transformers saves Gemma 3's without
    `vision_model`, and some programs save all with the `model.` that they have in memory."""
    shorter = published.replace("vision_tower.vision_model.", "vision_tower.")
    names = (published, shorter, *(TOWERS + "model." + name.removeprefix(TOWERS) for name in (published, shorter)))
    return next((name for name in names if name in beside), published)
