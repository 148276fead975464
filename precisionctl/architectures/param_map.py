"""Rows: which Hugging Face tensors one Megatron parameter is made of; and a family's table of them.

A row names its tensors in both layouts, whole, with `{layer}`, `{expert}` and `{mtp}` for their numbers (experts
are numbered through, whatever rank has them; multi-token prediction layers count from 0, and `{mtp_layer}` is
their number in Hugging Face, which counts on from the decoder's). Where a layer of Hugging Face is two of Megatron's,
as Megatron's hybrid layers are one block each, `{hf_layer}` is its number there: half of `{layer}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from typing import Literal

import numpy as np

from precisionctl.architectures.config_keys import Entry
from precisionctl.architectures.rearrangements import SAME, Movable, Rearrangement
from precisionctl.architectures.row_layers import Layers, is_among
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import REPLICATED, Layout, Parallel, TensorSpec
from precisionctl.torch_when_used import torch

Place = Mapping[str, int]
"""The numbers for a row's placeholders."""

MOST_ROWS = 1 << 24
"""More than any model's tensor has. A config from a stranger may say more, and NumPy would take the memory."""


@dataclass(frozen=True)
class Condition:
    """When a row's tensors exist in each layout: in Hugging Face's if the switch `hf` of ModelShape is on, in
    Megatron's if any of `megatron` is; always where none is named.

    A tensor that only one side has is a bias: filled with zeros on the way to that side, and checked to be zero on the
    way from it.
    """

    hf: str | None = None
    megatron: tuple[str, ...] = ()

    def in_layout(self, layout: Layout, model: ModelShape) -> bool:
        if layout == "hf":
            return self.hf is None or model.has(self.hf)
        return not self.megatron or any(map(model.has, self.megatron))


ALWAYS = Condition()

Naming = Literal["as stored", "as saved", "text alone", "in memory", "in torchtitan", "for engines"]
"""Which of a family's spellings (`Either`) a Hugging Face result has:

- `as stored`: that of its source
- `as saved`: the one that the model's class saves
- `text alone`: of a wrapper, the one that the class of its text model alone saves
- `in memory`: the one that the model's class has in memory, which trainers save
- `in torchtitan`: the one that torchtitan's names are made of
- `for engines`: the one in which engines with classes of their own look for codes
"""

OF_TRAINERS: Collection[Naming] = ("in memory", "in torchtitan")
"""The naming of results that other trainers go on from."""


def when(switch: str) -> Condition:
    """The condition of a tensor that both layouts have while `switch` of ModelShape is on."""
    return Condition(switch, (switch,))


@dataclass(frozen=True)
class Row:
    """One Megatron parameter and the Hugging Face tensors that it is made of.

    - `names`, `megatron`: the names in Hugging Face and in Megatron, with `{layer}`, `{expert}`, ... for numbers
    - `sizes`: the shape of the whole (all ranks') Megatron tensor, as fields of ModelShape or numbers
    - `rearrangement`: how the one is made of the others
    - `parallel`: how tensor parallelism cuts it; `parts`: the field with the numbers of rows of unequal parts
    - `present`: which models have it
    - `layers`: which layers do; `shares_kv`: unless None, only those of them that share keys and values (True), or that
      do not (False); `numbers`: unless None, only these of them, which are of one size
    - `gemm`: whether it is the weight of a GEMM that an FP8 recipe computes in FP8; routers stay in BF16
    - `only_exported`: whether it is the weight of one that becomes codes in exports alone
    - `values`: those of its Hugging Face tensors that stay values in exports
    - `keeps_dtype`: whether values keep their stored dtype, whatever the target's is
    - `integers_below`: a field of ModelShape, if they are integers from 0 to below it, which keep their dtype too
    - `wide_beside`: for a norm that is 1 more in Hugging Face than in Megatron, and would lose bits in BF16: it is FP32
      in Megatron, whatever is stored or asked for, and on the way back as wide as the parameters of these names beside
      it
    - `as_stored`: the same row under the source's names, if other names are written
    """

    names: str | tuple[str, ...]
    megatron: str
    sizes: tuple[str | int, ...]
    rearrangement: Rearrangement = SAME
    parallel: Parallel = REPLICATED
    present: Condition = ALWAYS
    parts: str | None = None
    layers: Layers = "all"
    shares_kv: bool | None = None
    numbers: tuple[int, ...] | None = None
    gemm: bool = False
    values: tuple[str, ...] = ()
    keeps_dtype: bool = False
    integers_below: str | None = None
    only_exported: bool = False
    wide_beside: tuple[str, ...] = ()
    as_stored: Row | None = None

    @property
    def source(self) -> Row:
        """The row as the source spells it."""
        return self.as_stored or self

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.names,) if isinstance(self.names, str) else self.names

    @property
    def of_experts(self) -> bool:
        """Whether expert parallelism deals this parameter out."""
        return "{expert}" in self.megatron

    @property
    def may_be_codes(self) -> bool:
        """Whether exports make codes of the weight, if the precision and the engine let them."""
        return self.gemm or self.only_exported

    @property
    def of_prediction(self) -> bool:
        """Whether this is part of a layer of multi-token prediction, which nothing here computes."""
        return "{mtp}" in self.megatron

    def renamed(self, hf: Mapping[str, str], megatron: Mapping[str, str] | None = None) -> Row:
        """The row with parts of its names replaced, in Hugging Face and in Megatron."""
        names, values = (tuple(_replaced(name, hf) for name in each) for each in (self.hf, self.values))
        return replace(self, names=names, values=values, megatron=_replaced(self.megatron, megatron or {}))

    @property
    def unused(self) -> bool:
        """Whether no program computes with this parameter. A checkpoint has it if `stores_unused` of ModelShape is
        set."""
        return self.present.hf == "stores_unused"

    def shape(self, model: ModelShape) -> tuple[int, ...]:
        """Shape of the whole Megatron tensor."""
        here = self.in_its_layers(model)
        return tuple(size if isinstance(size, int) else attrgetter(size)(here) for size in self.sizes)

    def cut(self, model: ModelShape) -> Parallel:
        """How tensor parallelism cuts the Megatron tensor of a model."""
        if self.parts is None:
            return self.parallel
        return replace(self.parallel, parts=attrgetter(self.parts)(self.in_its_layers(model)))

    def shapes(self, model: ModelShape, layout: Layout) -> tuple[tuple[int, ...], ...]:
        """Shapes of the row's tensors in one layout."""
        whole = self.shape(model)
        if layout == "megatron":
            return (whole,)
        if self.moves_rows(model) and whole[0] <= MOST_ROWS:
            moved = self.split(np.empty((whole[0], 1), np.uint8), model)
            return tuple((len(part), *whole[1:]) for part in moved)
        parts = self.split(torch.empty(whole, dtype=torch.uint8, device="meta"), model)  # any size costs nothing
        return tuple(tuple(part.shape) for part in parts)

    def merge(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        """Hugging Face's tensors, of `shapes(model, "hf")`, as the whole Megatron one, of `shape(model)`. If it only
        moves rows, these may be row numbers, `[rows, 1]` for `[rows, ...]`."""
        whole: Movable = self.rearrangement.merge(parts, self.in_its_layers(model))
        return whole

    def split(self, whole: Movable, model: ModelShape) -> tuple[Movable, ...]:
        """The inverse of `merge`: of one tensor of `shape(model)`, those of `shapes(model, "hf")`."""
        return self.rearrangement.split(whole, self.in_its_layers(model))

    def moves_rows(self, model: ModelShape) -> bool:
        """Whether `merge` and `split` only move rows (dimension 0)."""
        return self.rearrangement.moves_rows(model)

    def places(self, model: ModelShape) -> Iterator[Place]:
        """The numbers (layer, expert, ...) of every parameter that this row describes, in order."""
        for place in self.in_each_layer(model):
            if self.of_experts:
                yield from ({**place, "expert": expert} for expert in self._experts(model))
            else:
                yield place

    def count(self, model: ModelShape) -> int:
        """How many places there are. Those of experts are not listed, as a config may claim any number."""
        return sum(1 for _ in self.in_each_layer(model)) * (len(self._experts(model)) if self.of_experts else 1)

    def in_each_layer(self, model: ModelShape) -> Iterator[Place]:
        """A place in each layer that has the row, or one outside of layers."""
        if self.of_prediction:
            if self._in_layer(model.of_prediction, model.num_layers - 1):
                yield from ({"mtp": mtp, "mtp_layer": model.num_layers + mtp} for mtp in range(model.mtp_num_layers))
        elif "{layer}" in self.megatron:
            numbers = range(model.num_layers) if self.numbers is None else self.numbers
            layers = (layer for layer in numbers if self._in_layer(model, layer))
            yield from ({"layer": layer, "hf_layer": layer // 2} for layer in layers)
        else:
            yield {}

    def _experts(self, model: ModelShape) -> range:
        return range(model.moe.num_experts if model.moe else 0)

    def in_its_layers(self, model: ModelShape) -> ModelShape:
        """The model as the row's layers have it."""
        if self.numbers:
            return model.of_layer(self.numbers[0])
        return model.attention_of(in_window=self.layers != "global")

    def by_size(self, model: ModelShape) -> tuple[Row, ...]:
        """The row of a heterogeneous model's table as one for its layers of each size."""
        if model.heterogeneous is None or "{layer}" not in self.megatron:
            return (self,)
        sized: dict[tuple[int, ...], list[int]] = {}
        for place in self.in_each_layer(model):
            sized.setdefault(model.heterogeneous.of_layer(place["layer"]), []).append(place["layer"])
        return tuple(replace(self, numbers=tuple(layers)) for layers in sized.values())

    def _in_layer(self, model: ModelShape, layer: int) -> bool:
        return self.shares_kv in (None, model.shares_kv(layer)) and is_among(self.layers, model, layer)


@dataclass(frozen=True)
class Either:
    """Spellings of the same rows in Hugging Face, told apart by names, or by shapes where the names are the same.
    `first` is the published one, and `other` is found in files too. The stored one is read. Which is written follows
    from the Naming:

    - `in memory`, `for engines`, `text alone`: `in_memory`, `for_engines`, `alone`, if there is one
    - `as stored`: the stored one, but for what is `for_engines` alone; with `only_read` the first
    - all others: the first

    A spelling that is not written as stored is written under any of them where weights become codes under its names
    again (gpt-oss)."""

    first: tuple[Row, ...]
    other: tuple[Row, ...] = ()
    in_memory: tuple[Row, ...] = ()
    for_engines: tuple[Row, ...] = ()
    alone: tuple[Row, ...] = ()
    only_read: bool = False

    @property
    def spellings(self) -> tuple[tuple[Row, ...], ...]:
        """All that there are, the published one first."""
        return tuple(filter(None, (self.first, self.in_memory, self.for_engines, self.other, self.alone)))

    def renamed(self, hf: Mapping[str, str], megatron: Mapping[str, str] | None = None) -> Either:
        """All with parts of their names replaced, as a row's."""
        return self.changed(lambda rows: renamed(rows, hf, megatron))

    def changed(self, change: Callable[[tuple[Row, ...]], tuple[Row, ...]]) -> Either:
        """All spellings with their rows changed."""
        first, other, in_memory, for_engines, alone = map(
            change, (self.first, self.other, self.in_memory, self.for_engines, self.alone)
        )
        return Either(first, other, in_memory, for_engines, alone, self.only_read)

    def chosen(
        self, stored: Mapping[str, TensorSpec], model: ModelShape, naming: Naming, named_as_codes: Collection[str]
    ) -> tuple[Row, ...]:
        """The spelling that is written, with the one in `stored` as `as_stored` where that is another. `named_as_codes`
        as `Architecture.spelled` takes it."""
        read = self.first
        for other in filter(None, (self.in_memory, self.for_engines, self.other)):
            if _is_stored(read, other, stored, model):
                read = other

        not_as_stored = self.for_engines, self.other if self.only_read else ()
        of_codes = next((each for each in not_as_stored if _any_named(each, named_as_codes, self.first)), None)
        if of_codes:
            written = of_codes
        elif naming == "as stored" and not self.only_read and read is not self.for_engines:
            written = read
        else:
            named = {"in memory": self.in_memory, "for engines": self.for_engines, "text alone": self.alone}
            written = named.get(naming) or self.first

        if written is read or not _any_stored(read, stored, model):  # of a Megatron checkpoint none is
            return written
        by_key = {_key(each): each for each in read}
        return tuple(replace(row, as_stored=by_key.get(_key(row))) for row in written)


@dataclass(frozen=True)
class Alias:
    """A Hugging Face tensor `hf` that, while `switch` of ModelShape is on, is a copy of `of`.

    If it is stored, it must equal `of`. `written` says whether results have it.
    """

    hf: str
    of: str
    switch: str
    written: bool = False


TIED = Alias("lm_head.weight", of="model.embed_tokens.weight", switch="tied_embeddings")

ROTARY = ("model.layers.{layer}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
"""Older versions of transformers stored them."""


@dataclass(frozen=True)
class Architecture:
    """One family: its table of rows, and how its config.json says a ModelShape.

    `model_types` maps each Hugging Face `model_type` to its class. `derived` are Hugging Face tensors that a model
    makes again by itself, as patterns with `{layer}`. `behind` maps a module to the one directly before it, if the
    class defines it in another place than most classes (`checkpoints/other_trainers/numbered_optimizer.py`). `names_by`
    says whose names the rows have in Megatron: Megatron-Core's, if its modules have all of these parameters (it may
    compute something else with them); Megatron-Bridge's, if modules of its own have them; this project's, if neither
    has. `otherwise_in_transformers` is a note on what transformers alone computes differently, `heeds_latents_epsilon`
    says whether its class normalises latents of attention by config.json's epsilon, and not by 1e-6 as others.
    `more_rows` are rows whose names or sizes follow from the model's settings.
    """

    model_types: Mapping[str, str]
    rows: tuple[Row | Either, ...]
    config: tuple[Entry, ...]
    aliases: tuple[Alias, ...] = (TIED,)
    derived: tuple[str, ...] = ROTARY
    behind: Mapping[str, str] = field(default_factory=dict)
    names_by: Literal["Megatron-Core", "Megatron-Bridge", "this project"] = "Megatron-Core"
    otherwise_in_transformers: str = ""
    heeds_latents_epsilon: bool = False
    more_rows: Callable[[ModelShape], tuple[Row | Either, ...]] = lambda model: ()

    def spelled(
        self,
        stored: Mapping[str, TensorSpec],
        model: ModelShape,
        naming: Naming = "as stored",
        named_as_codes: Collection[str] = (),
    ) -> tuple[Row, ...]:
        """The rows, each in the spelling that `naming` asks for (Either), and with the spelling in `stored` as
        `as_stored`. `named_as_codes` are weights that get the names they have as codes, whatever `naming` is."""
        rows: list[Row] = []
        for row in (*self.rows, *self.more_rows(model)):
            rows += (row,) if isinstance(row, Row) else row.chosen(stored, model, naming, named_as_codes)
        return tuple(each for row in rows for each in row.by_size(model))

    def in_megatron(self, model: ModelShape) -> Iterator[Row]:
        """The rows of parameters that the model has in Megatron's layout."""
        rows = self.spelled({}, model)
        return (row for row in rows if row.present.in_layout("megatron", model) and row.count(model))

    @property
    def all_rows(self) -> Iterator[Row]:
        """`rows` in every spelling, the published one first."""
        for each in self.rows:
            yield from (each,) if isinstance(each, Row) else chain.from_iterable(each.spellings)

    def names_of(self, megatron: str) -> tuple[str, ...]:
        """What the parts of a Megatron parameter may be called in Hugging Face, by spelling, the published names
        first."""
        return tuple(dict.fromkeys(name for row in self.all_rows if row.megatron == megatron for name in row.hf))

    def in_memory(self, stored: Mapping[str, TensorSpec], model: ModelShape) -> dict[str, str]:
        """The names that the model's class has in memory for these `stored` tensors, where they differ. Tensors that
        are joined or transposed there are left out."""
        return other_names(self.spelled(stored, model, "in memory"), len(stored), model)


def _key(row: Row) -> tuple[str, Layers]:
    """What tells which row of another spelling is the same one."""
    return row.megatron, row.layers


def _any_named(rows: tuple[Row, ...], tensors: Collection[str], others: tuple[Row, ...]) -> bool:
    """Whether one of these tensors, of any layer and expert, has a name that these rows have, and the others have
    not."""
    if not (rows and tensors):
        return False
    own = {template for row in rows for template in row.hf} - {template for row in others for template in row.hf}
    pattern = re.compile("|".join(_NUMBER.sub(r"\\d+", re.escape(template)) for template in sorted(own)))
    return bool(own) and any(map(pattern.fullmatch, tensors))


_NUMBER = re.compile(r"\\\{\w+\\\}")
"""A placeholder of a template, escaped."""


def _any_stored(rows: tuple[Row, ...], stored: Container[str], model: ModelShape, others: tuple[Row, ...] = ()) -> bool:
    """Whether there is a tensor with a name that these rows have, and the others have not."""
    shared = {template for row in others for template in row.hf}
    return any(
        name in stored
        for row in rows
        for template, name in zip(row.hf, _first_names(row, model), strict=False)
        if template not in shared
    )


def _first_names(row: Row, model: ModelShape) -> tuple[str, ...]:
    """A row's tensors in Hugging Face at its first place; none if the model has no place for it."""
    place = next(iter(row.places(model)), None)
    return () if place is None else names(row, "hf", place)


def _is_stored(
    first: tuple[Row, ...], second: tuple[Row, ...], stored: Mapping[str, TensorSpec], model: ModelShape
) -> bool:
    """Whether the second spelling is the stored one."""
    if {row.hf for row in first} != {row.hf for row in second}:
        return _any_stored(second, stored, model, first)
    shapes = {
        name: shape
        for row in second
        if (found := _first_names(row, model))
        for name, shape in zip(found, row.shapes(model, "hf"), strict=True)
    }
    return any(name in stored for name in shapes) and all(
        stored[name].shape == shape for name, shape in shapes.items() if name in stored
    )


def names(row: Row, layout: Layout, place: Place) -> tuple[str, ...]:
    """The names of a row's tensors at one place."""
    templates = row.hf if layout == "hf" else (row.megatron,)
    return tuple(filled(name, place) for name in templates)


def other_names(rows: Iterable[Row], most: int, model: ModelShape) -> dict[str, str]:
    """The Hugging Face names of tensors in the source of these rows, each with what the row itself calls the same
    tensor, where that is another name. Rows of more than `most` places are passed over: a config.json may claim more
    layers than there are tensors."""
    found: dict[str, str] = {}
    for row in rows:
        mine, own = row.hf, row.source.hf
        if len(mine) == len(own) and row.rearrangement == row.source.rearrangement and row.count(model) <= most:
            pairs = [pair for pair in zip(own, mine, strict=True) if pair[0] != pair[1]]
            for place in row.places(model) if pairs else ():
                found |= {filled(here, place): filled(there, place) for here, there in pairs}
    return found


def filled(template: str, place: Place) -> str:
    """A name with the numbers of a place in it."""
    for key, number in place.items():
        template = template.replace(f"{{{key}}}", str(number))
    return template


def only_in(layers: Layers, rows: Iterable[Row]) -> tuple[Row, ...]:
    """The rows, of such layers alone."""
    return tuple(replace(row, layers=layers) for row in rows)


def only_with(switch: str, rows: Iterable[Row]) -> tuple[Row, ...]:
    """The rows, present in both layouts while `switch` of ModelShape is on."""
    return tuple(replace(row, present=when(switch)) for row in rows)


def as_values(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The rows, whose weights stay values in exports."""
    return tuple(replace(row, values=row.hf) for row in rows)


def published_or_in_memory(in_memory: Sequence[Row], published: Sequence[Row]) -> tuple[Row | Either, ...]:
    """The `published` rows, or the same ones by the names that transformers' class has `in_memory`, where these are
    others."""
    pairs = [*zip(published, in_memory, strict=True)]
    same = [row for row, other in pairs if row.hf == other.hf]
    first, second = (tuple(pair[number] for pair in pairs if pair[0] not in same) for number in (0, 1))
    return (*same, Either(first, in_memory=second))


def renamed(rows: Iterable[Row], hf: Mapping[str, str], megatron: Mapping[str, str] | None = None) -> tuple[Row, ...]:
    """The rows with parts of their names replaced, in Hugging Face and in Megatron."""
    return tuple(row.renamed(hf, megatron) for row in rows)


def _replaced(name: str, parts: Mapping[str, str]) -> str:
    for old, new in parts.items():
        name = name.replace(old, new)
    return name
