"""Extra state as Transformer Engine's own `get_extra_state` makes it, of every version, pickled by pickle itself from
classes under TE's names; and what its `set_extra_state` would unpickle from ours.

Each form follows the function in the version's own source: pytorch/module.py up to 0.7, pytorch/module/base.py after
it, pytorch/ops/op.py for fused operations.
"""

import enum
import io
import pickle
import sys
import types
from contextlib import contextmanager
from typing import NamedTuple

import torch

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


def columns(state, roles):
    """`scale` [columns] and `amax_history` [history, columns], as TE keeps them."""
    parts = [state.roles[role] for role in roles]
    return torch.stack([part.scale for part in parts]), torch.stack([part.amax_history for part in parts], 1)


def recipe_object(recipe, version, kind=DelayedScaling):
    """DelayedScaling as that version pickles it: with the fields that it had."""
    used = kind(**vars(recipe) | {"fp8_format": Format[recipe.fp8_format], "scaling_factor_compute_algo": None})
    if version < (2, 2):
        used.interval = -1
    if version >= (2, 15):
        used.backward_override = None
    if version >= (2, 16):
        used._cached_repr = "recipe_type=DelayedScaling, ..."
    return used


def extra_variables(recipe, version, gemms=1):
    found = {"fp8_checkpoint": True, "num_gemms": gemms, "update_amax_and_scale_fwd": True}
    found |= {"fp8_max_fwd": 448, "fp8_max_bwd": 57344 if recipe.fp8_format == "HYBRID" else 448}
    if version < (0, 6):
        found["global_fp8_buffer_pos_fwd_recompute"] = 7
    if version in ((1, 6), (1, 7)):
        found["buffer_index_and_autocast_key"] = [3, "fwd_key", 3, "bwd_key"]
    return found


def te_state(state, recipe, version, *, forward, backward, gemms=1, inverse=torch.reciprocal):
    """The table that `get_extra_state` makes before it pickles it."""
    found = {"recipe": recipe_object(recipe, version)} if version >= (2, 0) else {}
    for direction, roles in (("fwd", forward), ("bwd", backward)):
        scale, history = columns(state, roles)
        found |= {f"scale_{direction}": scale, f"amax_history_{direction}": history}
        if (0, 8) <= version < (2, 0):
            found[f"scale_inv_{direction}"] = inverse(scale)
    if version < (1, 6):
        found["global_fp8_buffer"] = {"FWD_AMAX_1": [torch.ones(3), torch.ones(3)]}
    if (0, 3) <= version < (0, 5):
        found["global_fp8_recompute_buffer"] = [torch.ones(3)]
    if (0, 12) <= version < (1, 6):
        found["global_fp8_state"] = {"FP8_AUTOCAST_COUNTER": 4, "buffer_delete_key_fwd": "FWD_AMAX_0"}
    return found | {"extra_fp8_variables": extra_variables(recipe, version, gemms)}


FORWARD, BACKWARD = ("input", "weight", "output"), ("grad_output", "grad_input")

VERSIONS = [(0, 1), (0, 3), (0, 5), (0, 6), (0, 8), (0, 12), (1, 0), (1, 6), (1, 8), (1, 14)]
VERSIONS += [(2, 0), (2, 2), (2, 15), (2, 20)]
"""One of each form."""


def of_module(state, recipe, version, forward=None, backward=None, gemms=1):
    """What a module of this version of TE leaves in a state dict."""
    old = version < (0, 6)
    forward, backward = forward or FORWARD[: 2 if old else 3], backward or BACKWARD[: 1 if old else 2]
    found = te_state(state, recipe, version, forward=forward, backward=backward, gemms=gemms)
    if version < (0, 3):
        first = [found[key] for key in ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")]
        return [*first, found["global_fp8_buffer"], True, 0, 0, "key", "key"]
    if version < (0, 6):
        return found
    if (0, 12) <= version < (1, 14):
        file = io.BytesIO()
        torch.save(found, file)
        return file
    return torch.frombuffer(bytearray(pickled(found)), dtype=torch.uint8)


def of_operation(state, recipe, version):
    """What te.ops.BasicLinear of this version leaves (1.13 to 2.20)."""
    whole = te_state(state, recipe, version, forward=FORWARD[:2], backward=BACKWARD[:1])
    extra = {"extra_fp8_variables": whole["extra_fp8_variables"]}
    if version < (2, 0):
        tensors = {
            "input": {key: value[..., :1] for key, value in whole.items() if key.endswith("_fwd")},
            "param": {key: value[..., 1:] for key, value in whole.items() if key.endswith("_fwd")},
            "grad_output": {key: value for key, value in whole.items() if key.endswith("_bwd")},
        }
        return pickled({mode: part | extra for mode, part in tensors.items()})
    recipe_too = {"recipe": whole["recipe"]} if version >= (2, 4) else {}
    halves = {"forward": "_fwd", "backward": "_bwd"}
    return pickled(
        {
            mode: recipe_too | {key: value for key, value in whole.items() if key.endswith(end)} | extra
            for mode, end in halves.items()
        }
    )


NOTHING = {
    "0.1 to 0.5": None,
    "0.6 to 0.11": torch.frombuffer(bytearray(pickle.dumps(None)), dtype=torch.uint8),
    "an operation of 1.13": torch.Tensor(),
    "1.14": torch.tensor([0x80, 0x04, 0x4E, 0x2E], dtype=torch.uint8),
    "an operation of 2.0": torch.frombuffer(bytearray(pickle.dumps({})), dtype=torch.uint8),
    "since 2.4": torch.empty(0, dtype=torch.uint8),
}
"""What modules without state leave."""


def empty_file():
    """Of 0.12 to 1.13."""
    file = io.BytesIO()
    torch.save(None, file)
    return file
