"""Load a recipe from a TOML file. Unknown keys are refused, with the nearest known one; `--set train.steps=200`
overrides a key.
"""

import dataclasses
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import GenericAlias, MappingProxyType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from precisionctl.errors import NEAR, RecipeError, most_alike, nearest, nearest_path
from precisionctl.recipe.sections import Recipe

TomlTable = dict[str, Any]
Section = TypeVar("Section")
_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)
"""The types of a section's keys, whose annotations are compiled once."""


def load_recipe(
    name: str | Path, overrides: Iterable[str] = (), known: Mapping[str, Any] = MappingProxyType({})
) -> Recipe:
    """Load a TOML file, or else the bundled recipe of that name, and apply `key=value` overrides. A file may name a
    `base`, a file beside it or a bundled recipe, for all keys that it does not have. `known` are values by full key
    (`precision.scaling`) that count before the file's, and after the overrides.

    Raises RecipeError for a file that is not there, invalid TOML, an unknown key or a value of the wrong type.
    """
    file = find_recipe(name)
    table = _read(file)
    for key, value in known.items():
        _set(table, key, value, str(file))
    for override in overrides:
        _set(table, *read_override(override), f"--set {override}")
    return _make(Recipe, table, prefix="", where=file)


def read_override(override: str) -> tuple[str, Any]:
    """The key and the value of `key=value`. Raises RecipeError for an unknown key, or a value of the wrong type."""
    key, equals, text = override.partition("=")
    key, where = key.strip(), f"--set {override}"
    if equals and re.fullmatch(r"\w+", key) and key not in _hints(Recipe):
        raise _unknown_key(key, where)
    if not equals or not re.fullmatch(r"\w+(\.\w+)+", key):
        what = f"--set wants section.key=value, not {override!r}"
        raise RecipeError(what, do="Such as --set train.steps=100; docs/recipes.md has all keys.")
    if key not in _known_keys(Recipe):
        raise _unknown_key(key, where)
    hint: Any = Recipe  # the type of the key, so that an error names the option and not the file
    for name_of_part in key.split("."):
        hint = _hints(_item(hint) or hint)[name_of_part]
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        table = {}
    value = table["value"] if len(table) == 1 else text  # what is not TOML is a string, as usual on a command line
    _value(hint, value, key, where)
    return key, value


def recipe_of(keys: Mapping[str, Any], where: Path) -> Recipe:
    """The recipe with these values, by full key (`precision.scaling`). `where` is for errors. Raises RecipeError as
    `load_recipe`."""
    table: TomlTable = {}
    for key, value in keys.items():
        _set(table, key, value, str(where))
    return _make(Recipe, table, prefix="", where=where)


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with keys joined by dots."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _read(file: Path, above: tuple[Path, ...] = ()) -> TomlTable:
    """A file's table merged over that of its base. `above` are the files that have led here."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"not TOML: {error}", where=file) from None
    if "base" not in table:
        return table
    base = table.pop("base")
    if not isinstance(base, str):
        raise RecipeError(f"base = {base!r} is not the name of a recipe", where=file)
    below = find_recipe(base, beside=file.parent)
    if below.resolve() in (lower.resolve() for lower in (file, *above)):
        raise RecipeError(f"base = {base!r} leads back to this recipe", where=file)
    table_below = _read(below, (file, *above))
    _make(Recipe, table_below, prefix="", where=below)  # so that its errors name it
    return _over(table, table_below)


def _over(table: TomlTable, below: TomlTable) -> TomlTable:
    """Merge two tables, section by section; where both have a key, `table` wins. Lists are not merged."""
    both = {**below, **table}
    for key, value in table.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            both[key] = _over(value, below[key])
    return both


def find_recipe(name: str | Path, beside: Path = Path()) -> Path:
    """The file of a recipe: a path relative to `beside`, else a bundled recipe. Raises RecipeError, with the bundled
    names, if there is neither."""
    if (beside / name).is_file():
        return beside / name
    bundled = bundled_recipes()
    try:
        return bundled[str(name)]
    except KeyError:
        if (beside / name).exists():
            raise RecipeError(
                "a recipe is a TOML file, and this is none",
                where=beside / name,
                do="Each process, and the command that continues, reads it again: write what a pipe gives into a file.",
            ) from None
        advice = nearest_path(beside / name) or nearest(str(name), bundled)
        raise RecipeError(f"no recipe {name}", do=f"Give a TOML file or a bundled one. {advice}") from None


def bundled_recipes() -> Mapping[str, Path]:
    """The files of the recipes that come with the program, by name."""
    package = Path(__file__).parent.parent
    folder = package / "recipes"  # in a wheel; a checkout has them beside the package
    files = (folder if folder.is_dir() else package.parent / "recipes").glob("*.toml")
    return {file.stem: file for file in sorted(files)}


def _set(table: TomlTable, key: str, value: Any, where: str) -> None:
    if key not in _known_keys(Recipe):
        raise _unknown_key(key, where)
    *sections, last = key.split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise RecipeError(f"{section} in {where} is a value, not a section")
    table[last] = value


def _make(kind: type[Section], table: TomlTable, prefix: str, where: object) -> Section:
    """A frozen dataclass from a TOML table; unknown keys and wrong types raise RecipeError."""
    hints = _hints(kind)
    for key in table:
        if key not in hints:
            raise _unknown_key(prefix + key, where)
    known = dataclasses.fields(kind)  # type: ignore[arg-type]  # a section is a dataclass
    needed = (one for one in known if one.default is one.default_factory is dataclasses.MISSING)
    if lacking := [one.name for one in needed if one.name not in table]:
        raise RecipeError(f"[{prefix.rstrip('.')}] lacks {' and '.join(lacking)}", where=where)
    return kind(**{key: _value(hints[key], value, prefix + key, where) for key, value in table.items()})


def _value(hint: Any, value: Any, key: str, where: object) -> Any:
    """A TOML value as the type `hint` of its key. Raises RecipeError for another type."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return _make(hint, value, f"{key}.", where)
    if hint == tuple[str, ...] and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    item = _item(hint)
    if item and isinstance(value, list) and all(isinstance(table, dict) for table in value):
        return tuple(_make(item, table, f"{key}.", where) for table in value)
    if get_origin(hint) is Literal and value in get_args(hint):
        return value
    if get_origin(hint) is Union:
        for each in get_args(hint):
            with suppress(RecipeError):
                return _value(each, value, key, where)
    if hint is float and type(value) is int and abs(value) < 1 << 63:
        return float(value)
    if type(value) is hint:  # not isinstance: true is no integer here
        return value
    raise RecipeError(f"{key} = {value!r} is not {_words(hint)}", where=where)


def _item(hint: Any) -> type | None:
    """The dataclass in a `tuple[Dataclass, ...]`; None for any other type."""
    item = get_args(hint)[0] if get_origin(hint) is tuple else None
    return item if isinstance(item, type) and dataclasses.is_dataclass(item) else None


def _words(hint: Any) -> str:
    """A type in words, for an error."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is Union:
        return " or ".join(map(_words, get_args(hint)))
    if isinstance(hint, GenericAlias):
        return "a list of tables" if _item(hint) else "a list of strings"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    return words.get(hint, "a section")


def _unknown_key(key: str, where: object) -> RecipeError:
    """The error for an unknown key. It names the key that is most like it, else the keys of its section, else all
    sections."""
    names = [*_known_keys(Recipe)]
    section, _, last = key.rpartition(".")
    known = {name.rpartition(".")[2]: name for name in reversed(names)}
    ends = (name for name in known if last.endswith(f"_{name}"))  # global_batch_size, adam_beta1
    if near := most_alike(last, known, NEAR) or next(ends, None):
        hint = f"Did you mean {known[near]}?"
    elif section and (inside := [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == section]):
        hint = f"Keys of {section}: {', '.join(inside)}."
    else:
        hint = f"Sections: {', '.join(_hints(Recipe))}; docs/recipes.md has all keys."
    return RecipeError(f"unknown key {key}", where=where, do=hint)


def _known_keys(kind: type, prefix: str = "") -> Iterable[str]:
    for key, hint in _hints(kind).items():
        yield prefix + key
        inner = _item(hint) or hint
        if dataclasses.is_dataclass(inner) and isinstance(inner, type):
            yield from _known_keys(inner, f"{prefix}{key}.")
