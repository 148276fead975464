"""`import torch` without its 1.6 s of CPU and 200 MB, until something is asked of it.

Commands that read headers, plan, or move bytes never ask. Files that such a command imports may say `import torch`, and
use it in functions and, unevaluated, in annotations, but nowhere that runs while they are imported.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_loader
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
        if name == "__path__":
            sys.meta_path.insert(0, _ImportedMeanwhile())
        return getattr(self, name)


class _ImportedMeanwhile(MetaPathFinder, Loader):
    """Who imports `torch.distributed` asks torch for its path, and torch, executed for that, imports the module itself.
    importlib would now execute it once more, and PyTorch abort: this finds and loads what is there."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        sys.meta_path.remove(self)  # the next import is one like any other
        self._module = sys.modules.get(name)
        return spec_from_loader(name, self) if self._module else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        assert self._module
        self._spec = self._module.__spec__
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has replaced it


def import_torch_when_used() -> None:
    """Put such a module in torch's place, unless it is imported already, or not there."""
    spec = None if "torch" in sys.modules else find_spec("torch")
    if spec is not None:
        sys.modules["torch"] = module = module_from_spec(spec)
        module.__class__ = _WhenUsed
        del module.__path__  # what asks for it is about to import a module in torch
