"""Packages whose modules are imported without what their `__init__` would start or ask for."""

import sys
from importlib.machinery import PathFinder
from types import ModuleType


def without_init(*names: str) -> None:
    """Let modules in these packages be imported. A package comes after the one that it is in."""
    for name in names:
        above = sys.modules[name.rpartition(".")[0]].__path__ if "." in name else None
        spec = PathFinder.find_spec(name, above)
        assert spec and spec.submodule_search_locations, name
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = [*spec.submodule_search_locations]
