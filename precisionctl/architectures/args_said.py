"""How Megatron's arguments are read: what must be there, what has few known values, and lists of layers."""

from collections.abc import Mapping
from typing import Any

from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown


def needed(args: Mapping[str, Any], name: str, where: object) -> Any:
    """An argument that every run has. Raises DamagedCheckpoint where it is not there."""
    if name not in args:
        raise DamagedCheckpoint(f"no `{name}`", where=where, do="Is the file whole?")
    return args[name]


def one_of(args: Mapping[str, Any], name: str, known: tuple[object, ...], default: object, where: object) -> Any:
    """An argument that has one of the `known` values. Raises UnknownArchitecture for another."""
    value = args.get(name, default)
    if value not in known:
        raise UnknownArchitecture(f"no family known here has Megatron's {name}={shown(value)}", where=where)
    return value


def norm_epsilon(args: Mapping[str, Any], where: object) -> Any:
    """The epsilon of norms, under its name since megatron-core 0.16 or the older one."""
    return args["layernorm_epsilon"] if "layernorm_epsilon" in args else needed(args, "norm_epsilon", where)


def entries(listed: Any) -> tuple[bool, ...]:
    """A list with an entry for each layer, and no word, whose letters could be as many. Raises DamagedCheckpoint."""
    if not isinstance(listed, list | tuple):
        raise DamagedCheckpoint(f"{shown(listed)} where a list has an entry for each layer")
    return tuple(bool(each) for each in listed)


def all_but_every(frequency: Any, num_layers: int) -> tuple[bool, ...]:
    """`N`: all layers but every N-th; a list: 1 where it is one."""
    if isinstance(frequency, int):
        return tuple(layer % frequency != 0 for layer in range(1, num_layers + 1))
    return entries(frequency)
