"""Names of modules by layer and kind, and patterns that match many of them."""

import re
from collections.abc import Sequence

_SPECIAL = re.compile(r"[*?[]")
"""What means something else in a pattern."""
_IN_LAYER = re.compile(r"(?P<group>.*?layers)\.(?P<layer>\d+)\.(?P<kind>.+)")


def split_name(module: str) -> tuple[str, int | None, str]:
    """`decoder.layers.7.mlp.linear_fc1` as group, layer and kind: `decoder.layers`, 7, `mlp.linear_fc1`. A module
    outside any layer is a kind of its own."""
    match = _IN_LAYER.fullmatch(module)
    return (match["group"], int(match["layer"]), match["kind"]) if match else ("", None, module)


def shortened(modules: set[str], all_modules: Sequence[str]) -> tuple[str, ...]:
    """Patterns, as of fnmatch, that match `modules` and no others of `all_modules`: where possible one for a kind of
    module in every layer, or for all modules of a layer; else the module's name."""
    patterns, left = [], dict.fromkeys(module for module in all_modules if module in modules)
    kinds: dict[tuple[str, str], None] = {}  # what is before and behind the star
    layers: dict[tuple[str, str], None] = {}
    for module in left:
        group, layer, kind = split_name(module)
        if layer is not None and not _SPECIAL.search(module):
            kinds[f"{group}.", f".{kind}"] = layers[f"{group}.{layer}.", ""] = None
    for start, end in (*kinds, *layers):
        if not left:
            break
        matched = {each for each in all_modules if each.startswith(start) and each.removeprefix(start).endswith(end)}
        if len(matched) > 1 and modules.issuperset(matched) and not matched.isdisjoint(left):
            patterns.append(f"{start}*{end}")
            left = {module: None for module in left if module not in matched}
    return (*patterns, *left)
