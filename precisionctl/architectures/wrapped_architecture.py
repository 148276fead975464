"""The text model of a wrapper by the names that it has there, and the table of both: its family's, and the towers'."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from precisionctl.architectures.config_keys import Config
from precisionctl.architectures.param_map import Architecture, Either, Naming, Row, other_names
from precisionctl.architectures.read_off import rows as rows_of
from precisionctl.architectures.shared.moe_rows import EXPERTS
from precisionctl.architectures.wrappers import TOWERS, WRAPPERS
from precisionctl.errors import MappingError, UnknownArchitecture
from precisionctl.model.model_parts import Wrapper
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import EMBEDDING, OUTPUT, TensorSpec


def can_be_wrapped(family: Architecture, wrapper: Wrapper) -> bool:
    """Whether a family's tensors all have names that the wrapper changes, or has, too."""
    return all(name.startswith(tuple(wrapper.names)) for row in family.all_rows for name in row.hf)


def in_directory(family: Architecture, model: ModelShape, config: Config, stored: Collection[str]) -> ModelShape:
    """The text model, of this family, by the names that a Hugging Face directory has for it. Raises UnknownArchitecture
    where they are not those of a text model and towers."""
    assert model.wrapper is not None, "a text model alone has its names from its family"
    in_memory = WRAPPERS[model.wrapper.model_type].in_memory
    for body, head in dict.fromkeys(((model.wrapper.body, model.wrapper.head), in_memory)):
        wrapper = replace(model.wrapper, body=body, head=head)
        towers = [name for name in stored if not wrapper.is_text(name)]
        has_text = any(wrapper.name_of(name) in stored for name in family.names_of(EMBEDDING))
        if has_text and towers and _by_towers(model.wrapper, towers) == wrapper:
            _check_marks(model.wrapper.model_type, towers)
            has_head = any(wrapper.name_of(name) in stored for name in family.names_of(OUTPUT))
            tied = config.get("tie_word_embeddings") is True or not has_head
            return replace(model, wrapper=wrapper, tied_embeddings=model.tied_embeddings and tied)
    raise UnknownArchitecture(f"its tensors do not have the names of a `{model.wrapper.model_type}`")


def beside_towers(model: ModelShape, config: Config, towers: Collection[str], *, has_head: bool) -> ModelShape:
    """The text model of a Megatron checkpoint, by the Hugging Face names that the wrapper's towers have. Raises
    UnknownArchitecture for towers of another wrapper, and where config.json says of the head what is not so."""
    assert model.wrapper is not None, "only a wrapper has towers"
    if towers:
        _check_marks(model.wrapper.model_type, towers)
    if not has_head and not model.tied_embeddings or has_head and config.get("tie_word_embeddings") is True:
        what = f"it has {'an' if has_head else 'no'} output layer, and tie_word_embeddings says otherwise"
        raise UnknownArchitecture(what, do="Is config.json this model's? If so, correct tie_word_embeddings in it.")
    return replace(model, wrapper=_by_towers(model.wrapper, towers), tied_embeddings=not has_head)


def _check_marks(model_type: str, towers: Collection[str]) -> None:
    mine = WRAPPERS[model_type]
    others = {kind.mark for kind in WRAPPERS.values() if kind.mark} - {mine.mark, *mine.marks_of_others}
    found = next((mark for mark in sorted(others) if any(mark in name for name in towers)), None)
    if found or not any(mine.mark in name for name in towers):
        has = f"have `{found}` in their names" if found else f"do not have `{mine.mark}` in their names"
        raise UnknownArchitecture(
            f"its towers {has}: they are not those of a `{model_type}`", do="Is config.json this model's?"
        )


def _by_towers(published: Wrapper, towers: Collection[str]) -> Wrapper:
    """The wrapper with the names that go with those of its towers, which in memory are mostly within `model`, too."""
    kind = WRAPPERS[published.model_type]
    if any(name.startswith(kind.towers_in_memory) for name in towers):
        body, head = kind.in_memory
        return replace(published, body=body, head=head)
    return published


@dataclass(frozen=True)
class WrappedArchitecture(Architecture):
    """A family's table under the names that it has in a wrapper, and a row for each tower that there is."""

    wrapper: Wrapper = field(kw_only=True)

    def spelled(
        self,
        stored: Mapping[str, TensorSpec],
        model: ModelShape,
        naming: Naming = "as stored",
        named_as_codes: Collection[str] = (),
    ) -> tuple[Row, ...]:
        if naming == "in memory" and self.wrapper.body != WRAPPERS[self.wrapper.model_type].in_memory[0]:
            raise MappingError(
                f"the names that the towers of a `{self.wrapper.model_type}` have in memory are not known here",
                do="Let transformers read the directory and save its state dict.",
            )
        towers = {name: spec for name, spec in stored.items() if not self.wrapper.is_text(name)}
        rows = (replace(row, megatron=TOWERS + row.hf[0], gemm=False, expert=False) for row in rows_of(towers))
        return (*super().spelled(stored, model, naming, named_as_codes), *rows)

    def in_memory(self, stored: Mapping[str, TensorSpec], model: ModelShape) -> dict[str, str]:
        """Those of the text model: what towers are called in memory is not known here."""
        rows = super().spelled(stored, model, "in memory")
        there = (replace(row, names=tuple(map(self._in_memory, row.hf)), as_stored=row.source) for row in rows)
        return other_names(there, len(stored), model)

    def _in_memory(self, name: str) -> str:
        body, head = WRAPPERS[self.wrapper.model_type].in_memory
        for here, there in ((self.wrapper.head, head), (self.wrapper.body, body)):  # which may be empty
            if name.startswith(here):
                return there + name.removeprefix(here)
        return name


def wrapped(family: Architecture, wrapper: Wrapper) -> WrappedArchitecture:
    """A family's table as a wrapper has it. config.json is compared key by key, so no key is the table's."""

    kind = WRAPPERS[wrapper.model_type]
    rows = tuple(kind.experts if kind.experts and row in EXPERTS else row for row in family.rows)

    def renamed(row: Row) -> Row:
        names, values = (tuple(map(wrapper.name_of, each)) for each in (row.hf, row.values))
        return replace(row, names=names, values=values)

    def renamed_either(either: Either) -> tuple[Row | Either, ...]:
        here = either.changed(lambda rows: tuple(map(renamed, rows)))
        if here.first == here.in_memory:  # `backbone.` and `model.`, which differ in the text model alone
            return here.first
        if kind.as_for_engines and wrapper.body == kind.body:  # as published
            return (Either(here.for_engines, in_memory=here.first),)
        return (replace(here, other=tuple(row.renamed(kind.other) for row in here.other)),)

    def all_renamed(some: Iterable[Row | Either]) -> tuple[Row | Either, ...]:
        made = ((renamed(row),) if isinstance(row, Row) else renamed_either(row) for row in some)
        return tuple(each for rows in made for each in rows)

    changed: dict[str, Any] = {
        "rows": all_renamed(rows),
        "more_rows": lambda model: all_renamed(family.more_rows(model)),
        "config": (),
        "aliases": tuple(replace(a, hf=wrapper.name_of(a.hf), of=wrapper.name_of(a.of)) for a in family.aliases),
        "derived": tuple(map(wrapper.name_of, family.derived)),
    }
    kept = {one.name: getattr(family, one.name) for one in fields(family)}
    return WrappedArchitecture(**kept | changed, wrapper=wrapper)
