"""What transformers makes of a directory's names in memory, by its own tables: other names, and tensors of several.

A list of modules that are not quantized is held against the names in memory. transformers renames what it reads by
tables for model types and classes (its conversion_mapping.py, 5.24), which are looked up here without making a model.
Those of a model's root are applied as they are. Those of a part hold within the module that the part is, which only a
model tells; so they are tried behind the first words of a name, and give names that may be none.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from precisionctl.errors import DamagedCheckpoint, require_package

_DEEPEST = 3
"""Words in front of which a part's names begin: `model.vision_tower.`."""

MOST_PARTS = 16
"""Kinds of parts with renamings of their own. No model has half as many, and each may double the names of a module."""


def module_names(config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, list[str]]:
    """For each module the names that the tables of its model and the model's body make of it: itself where it is not
    renamed, several where its rows are dealt out, none where it becomes a part of a tensor that is no linear's, as
    experts do."""
    # a class with a head has its body's layers as `model.layers`, and also finds them in files without that word, as
    # DeepSeek-V4's are published
    classes = config.get("architectures")
    has_head = isinstance(classes, list) and bool(classes) and classes[0] not in _of_body(config)
    table, body = _of_root(config), "model." if has_head else ""
    return {
        module: [f"{body}{name}" if name.startswith("layers.") else name for name in _through(table, module)]
        for module in sorted(modules)
    }


def possible(config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, list[str]]:
    """For each module all names that it may have: its own, those of `module_names`, and those that tables of parts
    give. Raises as `_of_parts`."""
    parts, found = _of_parts(config), {}
    for module, names in module_names(config, modules).items():
        all_names = dict.fromkeys((module, *names))
        for table in parts:
            for name in tuple(all_names):
                for prefix in _prefixes(name):
                    inner = _through(table, name.removeprefix(prefix))
                    all_names |= dict.fromkeys(prefix + each for each in inner)
        found[module] = list(all_names)
    return found


def joined_weights(config: Mapping[str, Any], weights: Iterable[str], codes: Iterable[str]) -> Iterator[str]:
    """The weights that become a part of another tensor, or several tensors; of those whose names differ in numbers
    alone the first. Without those whose result is a linear that has scales of its own, as one made of `codes` has.
    Raises as `_of_parts`.

    With these, and no others, transformers looks for scales (5.24, quantizers/base.py update_weight_conversions)."""
    root, parts = _of_root(config), _of_parts(config)
    coded = (name.removesuffix(".weight") for name in _unlike(codes))
    scaled = "\n".join(f"{name}.weight" for names in module_names(config, coded).values() for name in names)
    for name in _unlike(weights):
        inner = ((table, name.removeprefix(prefix)) for table in parts for prefix in _prefixes(name))
        for converter in (_converter(table, each) for table, each in [(root, name), *inner]):
            if converter is None or not all(each.endswith(".weight") for each in converter.source_patterns):
                continue
            if not re.search(f"{converter.target_patterns[0]}$", scaled, re.MULTILINE):
                yield name
                break


_NUMBER = re.compile(r"\d+")


def _unlike(names: Iterable[str]) -> Iterable[str]:
    """Of names that differ in numbers alone, as those of layers and experts, the first."""
    found: dict[str, str] = {}
    for name in names:
        found.setdefault(_NUMBER.sub("0", name), name)
    return found.values()


def _converter(table: list[Any], name: str) -> Any:
    """The first of a table that converts a tensor, once it is renamed by all that rename; None if none does."""
    for transform in table:
        name, matched = transform.rename_source_key(name)
        if matched is not None and _converts(transform):
            return transform
    return None


def _prefixes(name: str) -> Iterator[str]:
    """The first words of a name, none to as many as the names of a part may stand behind."""
    words = name.split(".")
    for depth in range(min(_DEEPEST, len(words) - 1) + 1):
        yield "".join(f"{word}." for word in words[:depth])


def _through(table: list[Any], module: str) -> list[str]:
    """The modules whose weight a tensor of this very name becomes, as Inkling 2's `sconv.weight_proj`, or else a
    module's weight: renamed by all that rename, then by the first that converts."""
    for stored in (module, f"{module}.weight"):
        name, names = stored, [stored]
        for transform in table:
            name, matched = transform.rename_source_key(name)
            if matched is not None:
                first, *more = transform.target_patterns
                names = [name, *(name.replace(first, target, 1) for target in more)]
                if _converts(transform):
                    break
        if weights := [each.removesuffix(".weight") for each in names if each.endswith(".weight")]:
            return weights
    return []


def _converts(transform: Any) -> bool:
    return hasattr(transform, "operations")


def _of_root(config: Mapping[str, Any]) -> list[Any]:
    """The table of a model and, within it, of its body, which models of all heads have as `model`."""
    named, classes = config.get("model_type"), config.get("architectures")
    of_class = _table([each for each in classes if isinstance(each, str)] if isinstance(classes, list) else [])
    root = of_class or _table([named] if isinstance(named, str) else [])
    body = _table(_of_body(config) if of_class else (each for each in _of_body(config)[:1] if each != named))
    for transform in body:
        transform.scope_prefix, transform.base_model_prefix = "", "model"
    return sorted([*root, *body], key=_converts)


def _of_body(config: Mapping[str, Any]) -> list[str]:
    """What the table of a body is found by: its class, else its model type."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return []
    body = _of_transformers()[0].get(model_type, model_type)
    return [body if isinstance(body, str) else body[0], model_type]


def _table(identifiers: Iterable[str]) -> list[Any]:
    """The renamings that transformers has for the first of these that it has any for."""
    table_of = _of_transformers()[1]
    return next((found for each in identifiers if (found := table_of(each))), [])


def _of_transformers() -> tuple[Mapping[str, Any], Any]:
    """Its classes of bodies by model type, and its function from a class or type to renamings."""
    require_package("transformers", "train", "a directory for transformers")
    from transformers import conversion_mapping
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return MODEL_MAPPING_NAMES, conversion_mapping.get_checkpoint_conversion_mapping


def _of_parts(config: Mapping[str, Any]) -> list[list[Any]]:
    """The tables of the parts of a model. Raises DamagedCheckpoint for parts of more kinds than any model has."""
    kinds = dict.fromkeys(tuple(_of_body(part)) for part in _parts(config))
    parts = [table for kind in kinds if (table := _table(kind))]
    if len(parts) > MOST_PARTS:
        raise DamagedCheckpoint(f"{len(parts)} kinds of models in one", where="config.json")
    return parts


def _parts(config: Mapping[str, Any], depth: int = 2) -> Iterator[Mapping[str, Any]]:
    """The configs within a config."""
    for key, value in config.items():
        if depth and key.endswith("_config") and isinstance(value, Mapping):
            yield value
            yield from _parts(value, depth - 1)
