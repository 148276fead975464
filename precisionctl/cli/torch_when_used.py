"""`import torch` without its 1.6 s of CPU and 200 MB, until something is asked of it.

Commands that read headers, plan, or move bytes never ask. Files that such a command imports may say `import torch`, and
use it in functions and, unevaluated, in annotations, but nowhere that runs while they are imported.
"""

import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any


class _WhenUsed(ModuleType):
    """A module that is executed when an attribute of it is first looked up, or a module in it imported."""

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        assert spec and spec.loader and spec.submodule_search_locations
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__path__ = spec.submodule_search_locations
        spec.loader.exec_module(self)
        return getattr(self, name)


def import_torch_when_used() -> None:
    """Put such a module in torch's place, unless it is imported already, or not there."""
    spec = None if "torch" in sys.modules else find_spec("torch")
    if spec is not None:
        sys.modules["torch"] = module = module_from_spec(spec)
        module.__class__ = _WhenUsed
        del module.__path__  # what asks for it is about to import a module in torch
