"""Find well-known objects: one in each module of a folder, so that an extension is one new file, and the entry points
of installed packages (docs/plugins.md). Nothing is loaded before a registry is asked."""

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, TypeVar

from precisionctl.errors import EnvironmentProblem

T = TypeVar("T")


def discover(package: ModuleType, attribute: str, kind: type[T]) -> list[T]:
    """The objects of a `kind` that are called `attribute` in the modules of `package`, in the order of the modules'
    names; then the entry points of the group that is called like it (`ENGINE`: `precisionctl.engines`), in the order of
    their names. Raises EnvironmentProblem for an entry point that does not load, or is something else."""
    return [*_own(package, attribute), *(_load(point, kind) for point in _plugged_in(attribute))]


def discover_names(
    package: ModuleType, attribute: str, kind: type[T], names: Callable[[T], Iterable[str]]
) -> dict[str, T]:
    """The same by their `names`. Raises EnvironmentProblem also for an entry point with a name that is taken."""
    found = {name: one for one in _own(package, attribute) for name in names(one)}
    for point in _plugged_in(attribute):
        one = _load(point, kind)
        for name in names(one):
            if name in found:
                raise _broken(point, f"brings `{name}`, which is there already")
            found[name] = one
    return found


def joined_tables(package: ModuleType, attribute: str) -> dict[str, Any]:
    """The tables that are called `attribute` in the modules of `package`, as one; plug-ins have none. Raises ValueError
    for a key that two of them have."""
    found: dict[str, Any] = {}
    for table in _own(package, attribute):
        if twice := found.keys() & table.keys():
            raise ValueError(f"{', '.join(sorted(map(str, twice)))} in two tables {attribute} of {package.__name__}")
        found |= table
    return found


@cache
def _own(package: ModuleType, attribute: str) -> list[Any]:
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    return [getattr(module, attribute) for module in modules if hasattr(module, attribute)]


_installed = cache(entry_points)  # looking through all that is installed takes some 10 ms


@cache
def _plugged_in(attribute: str) -> list[EntryPoint]:
    points = _installed().select(group=f"precisionctl.{attribute.lower()}s")
    return sorted(points, key=lambda point: point.name)


def _load(point: EntryPoint, kind: type[T]) -> T:
    try:
        found = point.load()
    except Exception as error:  # a stranger's module may raise anything
        raise _broken(point, f"does not load: {type(error).__name__}: {error}") from error
    if not isinstance(found, kind):
        raise _broken(point, f"is a {type(found).__name__}, no {kind.__name__}")
    return found


def _broken(point: EntryPoint, what: str) -> EnvironmentProblem:
    package = f"{point.dist.name} {point.dist.version}" if point.dist else "a package"
    return EnvironmentProblem(
        f"the plug-in `{point.name}` of {package} {what}",
        where=f"{point.group}: {point.value}",
        do="Update that package, or uninstall it.",
    )
