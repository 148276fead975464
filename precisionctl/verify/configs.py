"""Two config.json compared key by key, as far as no ModelShape says what they mean."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from precisionctl.architectures.families import architecture_of
from precisionctl.architectures.rope import PARAMETERS
from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.hf_directory.encodings_file import without_quantization
from precisionctl.engines.base import engines
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.same_model import differences
from precisionctl.model.text_config import text_path
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.quant_methods.base import KEYS_OF_VALUES
from precisionctl.sizes import listed
from precisionctl.untrusted.safe_json import parse_json
from precisionctl.untrusted.safe_patterns import in_time
from precisionctl.verify.not_compared import CONFIG_KEYS, QUANTIZER_KEYS, NotCompared, of_keys

_TOPIC = {key: topic for topic, keys in CONFIG_KEYS.items() for key in keys}
_FOLLOWS = ("tie_word_embeddings", "qk_head_dim")
"""Keys that say again what tensors show: whether a head is tied, and the sum of two sizes, which transformers' classes
compute whatever is said."""

_MODULES = (*KEYS_OF_VALUES, "targets")
"""Keys with lists of modules, whose order says nothing."""

ABSENT = object()
"""In place of the value of a key that is not there."""

Found = tuple[list[str], list[NotCompared]]
"""A line for each difference, and what was left out."""


def compare_configs(a: Reader, b: Reader) -> Found:
    """The keys of config.json that differ, and those that were left out: where both models have a table, keys that
    these read, also in a wrapper's part of the text model, since ModelShape compares their meaning, and those that
    follow (`_FOLLOWS`), also of other parts of a wrapper's. Null and absent differ, as a class may have a default.
    `quantization_config`, also that of a part around a wrapper's text model, is compared elsewhere."""
    models = (a.model, b.model)
    have_tables = not any(isinstance(model, UntabledModel) for model in models)
    here, there = (_config(reader, with_family=not have_tables) for reader in (a, b))
    if here is None or there is None:
        return [], [] if here is there else [NotCompared("config.json", f"only {'B' if here is None else 'A'} has one")]
    read = {path for model in models for path in _read_paths(model)} if have_tables else set()
    in_texts = {text_path(config) if model.wrapper else () for config, model in zip((here, there), models, strict=True)}
    differing, left_out = [], dict[str, list[str]]()
    for path, left, right in _unequal(here, there):
        key, name = path[0], ".".join(path)
        of_text = (path[len(text) :] for text in in_texts if path[: len(text)] == text)
        known = any(_is_read(each, read) for each in of_text) or have_tables and path[-1] in _FOLLOWS
        topic = "spelled otherwise" if known else _TOPIC.get(key)
        if topic == "spelled otherwise" and differences(*models):
            continue  # which are told as such
        if topic:
            left_out.setdefault(topic, []).append(name)
        else:
            differing.append(_line(f"config.json {name}", left, right))
    return differing, [line for topic, names in left_out.items() for line in of_keys(topic, names)]


def differing_keys(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """The keys, with dots, by which two config.json may describe two models, where no table says what they mean."""
    unequal = _unequal(without_quantization(here), without_quantization(there))
    return [".".join(path) for path, *_ in unequal if path[0] not in _TOPIC]


def compare_quantization(
    a: Mapping[str, Any], b: Mapping[str, Any], coded: Iterable[str] = (), file: str = "quantization_config"
) -> Found:
    """The differences of two `quantization_config`s; none if they are of different methods, which name things
    differently. Their lists of modules that are not codes differ if an engine takes one of the `coded` weights for
    values by one of them alone: of all others, and of a list that is not there, the tensors say what they are."""
    methods = [config.get("quant_method") for config in (a, b)]
    if methods[0] != methods[1]:
        return [], [NotCompared("quantization_config", " / ".join(str(method) for method in methods))]
    unequal = list(_unequal(_in_order(a), _in_order(b)))
    left_out = [
        path
        for path, left, right in unequal
        if any(key in QUANTIZER_KEYS for key in path)
        or (methods[0] == "compressed-tensors" and all(value in (None, ABSENT) for value in (left, right)))
    ]
    lists = [path for path, *_ in unequal if path[-1] in KEYS_OF_VALUES and coded]
    lines = [_line(f"{file} {'.'.join(path)}", *values) for path, *values in unequal if path not in (*left_out, *lists)]
    if lists and (contradicted := _ignored_otherwise(a, b, coded)):
        lines.append(f"{file}: a list of A or of B alone says that {listed(contradicted, 3)} are not codes")
    told = [*of_keys("quantizer", map(".".join, left_out)), *of_keys("ignored modules", map(".".join, lists))]
    return lines, told


def _ignored_otherwise(a: Mapping[str, Any], b: Mapping[str, Any], coded: Iterable[str]) -> list[str]:
    """Those of `coded` that some engine takes for values by one of two configs, and not by the other."""
    found: dict[str, None] = {}
    with in_time():
        for engine in engines().values():
            if rules := engine.methods.get(a.get("quant_method", "modelopt")):  # whose own file names no method
                said = (inner if isinstance(inner := each.get("quantization"), Mapping) else each for each in (a, b))
                here, there = map(rules.ignored.of, said)
                modules = (name.removesuffix(".weight") for name in coded)
                found |= dict.fromkeys(module for module in modules if here(module) != there(module))
    return list(found)


def _config(reader: Reader, *, with_family: bool) -> Mapping[str, Any] | None:
    data = reader.companions.files.get("config.json")
    if data is None:
        return None
    config = without_quantization(parse_json(data, "config.json"))
    return {key: value for key, value in config.items() if with_family or key != "model_type"}


_Path = tuple[str, ...]


def _read_paths(model: ModelShape) -> Iterator[_Path]:
    """The keys that the table of a text model's family looks at, and those within their objects that it also writes."""
    for entry in architecture_of(model.architecture).config:
        yield from ((key,) for key in entry.keys)
        for key, value in entry.write(model).items():
            yield from ((key, inner) for inner in (value if isinstance(value, Mapping) else ()))


def _is_read(path: _Path, read: set[_Path]) -> bool:
    """Whether a family's table looks at a key, and, of rotary parameters, at the one within."""
    return path[:2] in read or path[:1] in read and all(part in PARAMETERS for part in path[1:])


def _unequal(a: object, b: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object, object]]:
    """Every place in two JSON objects where they differ, with both values, or ABSENT."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys((*a, *b)):
            yield from _unequal(a.get(key, ABSENT), b.get(key, ABSENT), (*path, key))
    elif isinstance(a, Mapping) and a:
        for key, value in a.items():
            yield from _unequal(value, ABSENT, (*path, key))
    elif isinstance(b, Mapping) and b:
        for key, value in b.items():
            yield from _unequal(ABSENT, value, (*path, key))
    elif a != b or (type(a) is bool) != (type(b) is bool):
        yield path, a, b


def _in_order(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `quantization_config` with its lists of modules in order, at any depth."""
    made: dict[str, Any] = {}
    for key, value in config.items():
        if key in _MODULES and isinstance(value, list):
            value = sorted(map(str, value))
        made[key] = _in_order(value) if isinstance(value, Mapping) else value
    return made


def _line(name: str, a: object, b: object) -> str:
    here, there = ("not there" if value is ABSENT else f"{value!r:.60}" for value in (a, b))
    return f"{name} is {here} in A, {there} in B"
