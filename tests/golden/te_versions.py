"""Extra state by the code of any Transformer Engine from 1.9 on, which needs no GPU for it.

    python te_versions.py write FILE         what get_extra_state gives of a module with numbers in every cell
    python te_versions.py read FILE          what the module holds after set_extra_state, as JSON
    python te_versions.py columns FILE       the same of a grouped linear of 2 GEMMs: by role and GEMM, as TE finds them

Runs where a `transformer_engine` wheel without compiled code is importable. The functions are taken out of its
pytorch/module/base.py, whose other imports need CUDA, and run on an object that has what they touch. A file that
begins as an archive of torch.save is given as io.BytesIO, as TE up to 1.13 has it, any other as a tensor of bytes.
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

os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"
ROOT = Path(importlib.util.find_spec("transformer_engine").origin).parent
for name in ("transformer_engine", "transformer_engine.common", "transformer_engine.pytorch"):
    package = types.ModuleType(name)
    package.__path__ = [str(ROOT.joinpath(*name.split(".")[1:]))]
    sys.modules[name] = package
recipe = importlib.import_module("transformer_engine.common.recipe")
try:
    gate = vars(importlib.import_module("transformer_engine.pytorch._extra_state"))
except ModuleNotFoundError:  # before 2.16.1
    gate = {}

torch.cuda.synchronize = lambda: None
load = torch.load


def on_a_cpu(file, map_location=None, **options):
    return load(file, weights_only=False)


namespace = {**gate, "torch": torch, "pickle": pickle, "io": io, "DelayedScaling": recipe.DelayedScaling}
namespace |= {"is_in_onnx_export_mode": lambda: False, "_has_delayed_scaling_state": lambda meta: True}
for node in ast.walk(ast.parse((ROOT / "pytorch/module/base.py").read_text())):
    if getattr(node, "name", "") in ("get_extra_state", "set_extra_state"):
        node.returns = None
        for argument in node.args.args:
            argument.annotation = None
        exec(compile(ast.Module([node], []), "base.py", "exec"), namespace)


class Module:
    fp8 = fp8_calibration = True

    def __init__(self, history, num_gemms=1):
        used = recipe.DelayedScaling(amax_history_len=history)
        self.fp8_meta = {"fp8_checkpoint": True, "fp8_group": None, "num_gemms": num_gemms, "recipe": used}
        self.fp8_meta |= {"fp8_max_fwd": 448.0, "fp8_max_bwd": 57344.0, "buffer_index_and_autocast_key": [1, "a", 2]}
        self.init_fp8_meta_tensors()

    def init_fp8_meta_tensors(self, used=None):
        rows = self.fp8_meta["recipe"].amax_history_len
        for key, columns in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            columns *= self.fp8_meta["num_gemms"]
            ones, history = torch.ones(columns), torch.zeros(rows, columns)
            self.fp8_meta[key] = SimpleNamespace(scale=ones, scale_inv=ones.clone(), amax_history=history)


def write(path):
    module = Module(4)
    for key, factor in (("scaling_fwd", 1), ("scaling_bwd", 100)):  # as te_payloads.trained
        state = module.fp8_meta[key]
        rows, columns = (torch.arange(float(n)) for n in state.amax_history.shape)
        state.scale.copy_(factor * 2.0**columns)
        state.scale_inv.copy_(1 / state.scale)
        state.amax_history.copy_(factor * (rows[:, None] + columns / 8))
        state.amax_history[0] = 0
    found = namespace["get_extra_state"](module)
    Path(path).write_bytes(found.getvalue() if isinstance(found, io.BytesIO) else found.numpy().tobytes())


def loaded(path, num_gemms=1):
    data = Path(path).read_bytes()
    value = io.BytesIO(data) if data.startswith(b"PK") else torch.frombuffer(bytearray(data), dtype=torch.uint8)
    module = Module(1024, num_gemms)  # the user's recipe is another one
    torch.load = on_a_cpu
    namespace["set_extra_state"](module, value)
    return module.fp8_meta


def read(path):
    meta = loaded(path)
    parts = ("scale", "amax_history") if hasattr(meta["recipe"], "delayed") else ("scale", "scale_inv", "amax_history")
    tensors = {
        key: {part: getattr(meta[key], part).tolist() for part in parts} for key in ("scaling_fwd", "scaling_bwd")
    }
    extra = {name: value for name, value in meta.items() if isinstance(value, bool | int | float | str)}
    print(json.dumps({**tensors, "history": meta["recipe"].amax_history_len, "extra": extra}))


def columns(path):
    """Where GroupedLinear looks for each tensor's scale: the offsets are evaluated in its own source."""
    meta, num_gemms = loaded(path, 2), 2
    source = ast.parse((ROOT / "pytorch/module/grouped_linear.py").read_text())
    offsets = next(
        node.value
        for node in ast.walk(source)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self._offsets"
    )
    found = eval(compile(ast.Expression(offsets), "grouped_linear.py", "eval"), {"num_gemms": num_gemms})
    strided = "_num_fp8_tensors_per_gemm" in (ROOT / "pytorch/module/grouped_linear.py").read_text()
    steps = {"scaling_fwd": 3, "scaling_bwd": 2} if strided else {"scaling_fwd": 1, "scaling_bwd": 1}
    places = {"input": "scaling_fwd", "weight": "scaling_fwd", "grad_output": "scaling_bwd"}
    scales = {
        role: [meta[key].scale[found[role] + i * steps[key]].item() for i in range(num_gemms)]
        for role, key in places.items()
    }
    print(json.dumps(scales))


if __name__ == "__main__":
    {"write": write, "read": read, "columns": columns}[sys.argv[1]](sys.argv[2])
