"""Find one well-known object in each module of a folder, so that an extension is a dropped-in file."""

import importlib
import pkgutil
from types import ModuleType
from typing import Any


def discover(package: ModuleType, attribute: str) -> list[Any]:
    """The objects named `attribute` in the modules of `package`, in the order of the modules' names."""
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    return [getattr(module, attribute) for module in modules if hasattr(module, attribute)]
