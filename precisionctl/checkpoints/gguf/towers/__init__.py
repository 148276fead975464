"""The towers that llama.cpp has in a second file, `mmproj`, each in the file of its makers."""

import sys
from collections.abc import Mapping
from typing import Any

from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.gguf.towers.tower import Tower, TowerKind, TowerSettings, no_tower
from precisionctl.discover import joined_tables
from precisionctl.model.model_shape import ModelShape
from precisionctl.untrusted.safe_json import parse_json

TOWERS: Mapping[str, TowerKind] = joined_tables(sys.modules[__name__], "TOWERS")
"""By the `model_type` of the wrapper."""

_WITHIN = ("media_proc_cfg", "image_processor")
"""Parts of the files about images that may have what others have at their top."""


def tower_of(model: ModelShape, companions: Companions) -> Tower:
    """The tower of a wrapper's `model`, as config.json and its like describe it. Raises UnknownArchitecture for one
    that llama.cpp has not, or of which it would compute something else."""
    assert model.wrapper is not None, "only a wrapper has towers"
    kind = model.wrapper.model_type
    if kind not in TOWERS:
        raise no_tower(f"the towers of a `{kind}` are not among those that are written for llama.cpp")
    config = _parsed(companions, "config.json")
    tower = config.get("vision_config")
    if not isinstance(tower, Mapping):
        raise no_tower("its config.json has no `vision_config`")
    processor = dict[str, Any]()
    for name in ("preprocessor_config.json", "processor_config.json"):
        said = _parsed(companions, name)
        for part in (said, *(said[key] for key in _WITHIN if isinstance(said.get(key), Mapping))):
            processor |= part
    settings = {**TOWERS[kind].defaults, **tower}
    return TOWERS[kind].made_by(
        TowerSettings(model, config, settings, processor, companions.files.get("tokenizer.json"))
    )


def _parsed(companions: Companions, name: str) -> Mapping[str, Any]:
    return parse_json(companions.files[name], name) if name in companions.files else {}
