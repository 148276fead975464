"""Settings of a model that an engine's class of it passes over, and what it computes by instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from precisionctl.engines.rules.rule import EngineRule, Finding
from precisionctl.errors import shown


@dataclass(frozen=True)
class FixedSettings:
    """That of models of these `model_types` an engine takes `values`, by key, whatever config.json says, by a `rule`.
    What makes a value of the whole config returns None where the engine computes what is said. A key that config.json
    lacks says the family's usual value, for which the engine's class was written."""

    model_types: tuple[str, ...]
    values: Mapping[str, bool | float | Callable[[Mapping[str, Any]], object]]
    rule: EngineRule

    def check(self, config: Mapping[str, Any]) -> Iterator[Finding]:
        """The keys under which a config.json has other values."""
        if str(config.get("model_type")) not in self.model_types:
            return
        for key, value in self.values.items():
            said, taken = config.get(key), value(config) if callable(value) else value
            if said is not None and taken is not None and said != taken:
                yield Finding("config.json", f"{key} is {shown(said)}, and taken for {shown(taken)}", self.rule)


def one_token_more(config: Mapping[str, Any]) -> object:
    """A window of one token more than config.json says, if a layer has it."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    has_windows = not isinstance(kinds, list) or _WINDOW in kinds
    return window + 1 if type(window) is int and has_windows else None


def in_every_other_layer(config: Mapping[str, Any]) -> object:
    """Windows in the first layer and every other one after it."""
    kinds = config.get("layer_types")
    return [(_WINDOW, "full_attention")[layer % 2] for layer in range(len(kinds))] if isinstance(kinds, list) else None


def in_all_layers(config: Mapping[str, Any]) -> object:
    """Windows in all layers, if there are any."""
    kinds, window = config.get("layer_types"), config.get("use_sliding_window") and config.get("sliding_window")
    return [_WINDOW] * len(kinds) if isinstance(kinds, list) and window else None


_WINDOW = "sliding_attention"
