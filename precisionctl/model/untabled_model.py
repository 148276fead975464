"""A model without a table, of which next to nothing is known."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from precisionctl.errors import UnknownArchitecture
from precisionctl.model.model_shape import ModelShape


class UntabledModel(ModelShape):
    """A model that no table here describes: of what it computes, nothing is known but its `architecture` and its
    config.json. Any other field of a ModelShape raises `why`, an UnknownArchitecture that says how to get a table. So
    code that needs a table is refused where it first uses it. `within` is what the names of a bare model lack, such as
    `model.`, as which engines load it; empty for any other."""

    def __init__(
        self, architecture: str, config: Mapping[str, Any], why: UnknownArchitecture, within: str = ""
    ) -> None:
        vars(self).update(architecture=architecture, config=config, why=why, within=within, wrapper=None)

    def __getattribute__(self, name: str) -> Any:
        if name in _UNKNOWN:
            raise self.why
        return super().__getattribute__(name)

    def described(self) -> dict[str, Any]:
        return {"architecture": self.architecture, "no_table": self.why.what}


_UNKNOWN = frozenset(field.name for field in dataclasses.fields(ModelShape)) - {"architecture", "wrapper"}
