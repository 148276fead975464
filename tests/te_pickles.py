"""Extra state as Transformer Engine's own `get_extra_state` makes it, pickled by pickle itself from classes under TE's
names; and what its `set_extra_state` would unpickle from ours."""

import enum
import pickle
import sys
import types
from contextlib import contextmanager
from typing import NamedTuple

RECIPES = "transformer_engine.common.recipe"
MEGATRON = "megatron.core.extensions.transformer_engine"


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    E4M3 = _FormatHelper(max_fwd=448, max_bwd=448)
    HYBRID = _FormatHelper(max_fwd=448, max_bwd=57344)


class DelayedScaling:
    def __init__(self, **fields):
        self.__dict__ = {"margin": 0, "fp8_format": Format.HYBRID, "amax_history_len": 1024} | fields


class TEDelayedScaling(DelayedScaling):
    pass


class Float8CurrentScaling(DelayedScaling):
    pass


_CLASSES = {
    RECIPES: (_FormatHelper, Format, DelayedScaling, Float8CurrentScaling),
    MEGATRON: (TEDelayedScaling,),
}
for _module, _classes in _CLASSES.items():
    for _class in _classes:
        _class.__module__, _class.__qualname__ = _module, _class.__name__


@contextmanager
def te_installed():
    """Importing TE's and Megatron's modules gives the classes above, for as long as this lasts."""
    made = {module: types.ModuleType(module) for module in _CLASSES}
    for module, classes in _CLASSES.items():
        for each in classes:
            setattr(made[module], each.__name__, each)
        for parent in range(1, module.count(".") + 1):
            name = module.rsplit(".", parent)[0]
            made.setdefault(name, types.ModuleType(name))
    kept = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def pickled(value):
    with te_installed():
        return pickle.dumps(value)


def unpickled(data):
    with te_installed():
        return pickle.loads(data)
