"""Keys that engines look for in config.json and transformers 5 does not write: what of them a config lacks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from precisionctl.engines.rule import EngineRule, Finding

MissingKeys = Callable[[Mapping[str, Any]], Iterator[str]]
"""From a config.json, the required keys that it lacks."""


@dataclass(frozen=True)
class RequiredKeys:
    """Keys that a config.json must have: an export adds those that `lacks` names, and `verify` reports them."""

    lacks: MissingKeys
    rule: EngineRule

    def findings(self, config: Mapping[str, Any]) -> Iterator[Finding]:
        for key in self.lacks(config):
            yield Finding("config.json", f"no {key}", self.rule)


def of_models(model_types: tuple[str, ...], *keys: str) -> MissingKeys:
    """These keys, in a config of these models."""

    def lacks(config: Mapping[str, Any]) -> Iterator[str]:
        if config.get("model_type") in model_types:
            yield from (key for key in keys if config.get(key) is None)

    return lacks


def rotary_of_transformers_4(config: Mapping[str, Any]) -> Iterator[str]:
    """What transformers 4 called `rope_parameters`; where those differ by kinds of layers, it had other words."""
    said = config.get("rope_parameters")
    if not isinstance(said, Mapping) or any(isinstance(value, Mapping) for value in said.values()):
        return
    scaled = said.get("rope_type", "default") != "default"
    partly = said.get("partial_rotary_factor", 1) != 1
    older = {"rope_theta": "rope_theta" in said, "partial_rotary_factor": partly}
    yield from (key for key, there in {**older, "rope_scaling": scaled}.items() if there and key not in config)
