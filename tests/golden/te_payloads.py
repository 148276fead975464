"""`_extra_state` payloads by Transformer Engine's own code: writes the golden files, and reads ours.

Does what lines of its input ask for, and answers each with a line (`echo write here | python te_payloads.py`):

    write DIRECTORY      every payload in PAYLOADS, one file each
    read PAYLOAD         what TE's module holds after loading it, as JSON
    classify PAYLOAD     what TE would do with it before unpickling anything

Runs where the `transformer-engine` wheel (the one without compiled code), torch and pydantic are installed; no
GPU. The recipe classes are imported from it; `get_extra_state` and `set_extra_state` are taken out of its
module/base.py, whose other imports need CUDA, and run on an object that has what they touch.
"""

import ast
import importlib
import importlib.util
import io
import json
import os
import pickle
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import torch


def te_package():
    """Where TE is installed, with its packages entered so that importing them runs no code that needs CUDA."""
    root = Path(importlib.util.find_spec("transformer_engine").origin).parent
    for name in ("transformer_engine", "transformer_engine.common", "transformer_engine.pytorch"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    return root


ROOT = te_package()
recipe = importlib.import_module("transformer_engine.common.recipe")
extra_state = importlib.import_module("transformer_engine.pytorch._extra_state")


class TEDelayedScaling(recipe.DelayedScaling):
    """Named as Megatron's subclass, which adds nothing but a constructor."""


TEDelayedScaling.__module__ = "megatron.core.extensions.transformer_engine"
sys.modules[TEDelayedScaling.__module__] = SimpleNamespace(TEDelayedScaling=TEDelayedScaling)


def te_functions(file, names):
    """Functions of a TE source file, wherever in it, over a namespace that has what they use."""
    namespace = {
        **vars(extra_state),
        "torch": torch,
        "pickle": pickle,
        "io": io,
        "DelayedScaling": recipe.DelayedScaling,
    }
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if getattr(node, "name", "") in names]
    for node in nodes:
        node.returns = None
        for argument in node.args.args:
            argument.annotation = None
        exec(compile(ast.Module([node], []), str(file), "exec"), namespace)
    return namespace


TE = te_functions(ROOT / "pytorch/module/base.py", {"get_extra_state", "set_extra_state"})
TE |= {"_has_delayed_scaling_state": lambda meta: meta["recipe"].delayed()}
torch.cuda.synchronize = lambda: None


class Module:
    """As much of a TE module as saving and loading extra state touches."""

    fp8 = fp8_calibration = True

    def __init__(self, num_gemms=1):
        self.fp8_meta = {"fp8_checkpoint": True, "fp8_group": None, "num_gemms": num_gemms}

    def init_fp8_meta_tensors(self, used):
        """DelayedScalingRecipeState: scale 1 and a history of zeros."""
        for key, columns in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            columns *= self.fp8_meta["num_gemms"]
            history = torch.zeros(used.amax_history_len, columns)
            self.fp8_meta[key] = SimpleNamespace(scale=torch.ones(columns), amax_history=history)

    def get(self):
        return TE["get_extra_state"](self).numpy().tobytes()

    def set(self, payload):
        TE["set_extra_state"](self, torch.frombuffer(bytearray(payload), dtype=torch.uint8))


def trained(used, num_gemms=1, **meta):
    """A module with numbers in every cell: `scale[column]` is 2**column, `amax_history[row, column]` is
    row + column/8 but for row 0, which rests at zero. Backward ones are 100 times as large."""
    module = Module(num_gemms)
    limits = used.fp8_format.value
    module.fp8_meta |= {"recipe": used, "fp8_max_fwd": limits.max_fwd, "fp8_max_bwd": limits.max_bwd, **meta}
    module.init_fp8_meta_tensors(used)
    for key, factor in (("scaling_fwd", 1), ("scaling_bwd", 100)):
        state = module.fp8_meta[key]
        rows, columns = (torch.arange(float(n)) for n in state.amax_history.shape)
        state.scale.copy_(factor * 2.0**columns)
        state.amax_history.copy_(factor * (rows[:, None] + columns / 8))
        state.amax_history[0] = 0
    return module


def printed(used):
    str(used)  # leaves `_cached_repr` in the object, as a run of TE does
    return used


def operation():
    """What `te.ops.BasicLinear` keeps (pytorch/ops/op.py): halves, with two forward columns and one backward."""
    module = trained(recipe.DelayedScaling(amax_history_len=4))
    halves = {}
    for half, mode, columns in (("fwd", "forward", 2), ("bwd", "backward", 1)):
        state = module.fp8_meta[f"scaling_{half}"]
        halves[mode] = {
            "recipe": module.fp8_meta["recipe"],
            f"scale_{half}": state.scale[:columns].clone(),
            f"amax_history_{half}": state.amax_history[:, :columns].clone(),
            "extra_fp8_variables": {"fp8_checkpoint": True},
        }
    return pickle.dumps(halves)


def stateless(used):
    """What TE up to 2.16.0 wrote for a recipe without state; from then on nothing."""
    return pickle.dumps({"recipe": used, "extra_fp8_variables": {"fp8_checkpoint": True, "num_gemms": 1}})


def te_1():
    """What TE 1.14 wrote: no recipe, and scale_inv besides."""
    module = trained(recipe.DelayedScaling(amax_history_len=4))
    state = pickle.loads(module.get())
    del state["recipe"]
    return pickle.dumps(state | {"scale_inv_fwd": 1 / state["scale_fwd"], "scale_inv_bwd": 1 / state["scale_bwd"]})


E4M3 = recipe.Format.E4M3
PAYLOADS = {
    "linear": lambda: trained(recipe.DelayedScaling(amax_history_len=4)).get(),
    "linear_printed": lambda: trained(
        printed(recipe.DelayedScaling(2, E4M3, 4, "most_recent", reduce_amax=False, fp8_dpa=True, fp8_mha=True))
    ).get(),
    "megatron": lambda: trained(TEDelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")).get(),
    "layernorm_mlp": lambda: trained(recipe.DelayedScaling(amax_history_len=2), num_gemms=2).get(),
    "attention": lambda: trained(
        recipe.DelayedScaling(amax_history_len=1),
        num_gemms=3,
        local_recipes=[recipe.Float8CurrentScaling(), recipe.DelayedScaling()],
    ).get(),
    "operation": operation,
    "te_1": te_1,
    "none": lambda: pickle.dumps(None),
    "empty_dict": lambda: pickle.dumps({}),
    "current_scaling": lambda: stateless(recipe.Float8CurrentScaling()),
    "block_scaling": lambda: stateless(recipe.Float8BlockScaling()),
    "mxfp8": lambda: stateless(recipe.MXFP8BlockScaling()),
    "nvfp4": lambda: stateless(recipe.NVFP4BlockScaling()),
}


def write(directory):
    for name, make in PAYLOADS.items():
        Path(directory, f"{name}.bin").write_bytes(make())
    return f"{len(PAYLOADS)} payloads"


def read(path):
    os.environ[extra_state.UNSAFE_PICKLE_EXTRA_STATE_ENV] = "1"
    module = Module()
    module.set(Path(path).read_bytes())
    meta = module.fp8_meta
    fields = {name: getattr(meta["recipe"], name) for name in recipe.DelayedScaling.__dataclass_fields__}
    tensors = {
        key: [getattr(meta[key], part).tolist() for part in ("scale", "amax_history")]
        for key in ("scaling_fwd", "scaling_bwd")
    }
    extra = {name: value for name, value in meta.items() if isinstance(value, bool | int | float)}
    made = f"{type(meta['recipe']).__module__}.{type(meta['recipe']).__name__}"
    return json.dumps({"class": made, "recipe": fields, "extra": extra, **tensors}, default=lambda value: value.name)


def classify(path):
    return extra_state._classify_extra_state_pickle(Path(path).read_bytes()).value


if __name__ == "__main__":
    for line in sys.stdin:
        command, _, path = line.rstrip("\n").partition(" ")
        print({"write": write, "read": read, "classify": classify}[command](path), flush=True)
