"""Which part of a config.json describes the text model."""

from collections.abc import Mapping
from functools import reduce
from operator import getitem
from typing import Any


def text_part(config: Mapping[str, Any]) -> Any:
    """What a wrapper's config.json has of its text model; None where it has nothing. `llm_config` is the word of
    InternVL's code, which NVIDIA's published Nemotrons have, and `language_config` that of DeepSeek's. Models
    that also speak (Qwen Omni) have a part for what thinks, and the text model's within it."""
    path = text_path(config)
    return reduce(getitem, path, config) if path else None


def text_path(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys that lead to `text_part`; none where there is none."""
    places = ((config, ()), (config.get("thinker_config"), ("thinker_config",)))
    said = (
        (*above, key)
        for part, above in places
        for key in ("text_config", "llm_config", "language_config")
        if isinstance(part, Mapping) and part.get(key) is not None
    )
    return next(said, ())


def config_parts(config: Mapping[str, Any]) -> list[Any]:
    """The objects of a config.json that may say something of its text model as a whole, the outermost first: the file's
    own, that of what thinks, and the text model's."""
    parts = (config, config.get("thinker_config"), text_part(config))
    return [part for part in parts if isinstance(part, Mapping)]
