"""Transformer Engine's own Python on a CPU: its compiled functions, and CUDA, are stood in for in plain PyTorch.

`install()` comes before TE is imported, from its Python wheel, which has no compiled code. Modules, autocast,
quantizers, recipe state, extra state and FusedAdam are then TE's source as published; what its kernels compute is in
`te_kernels.py`. Tensors "on CUDA" lie in memory.

It proves what is Python in TE: which calls are accepted, which amax lands where, when a scale is updated, what is saved
and loaded. It does not prove what a kernel rounds: `tests/gpu` does, on a GPU.
"""

import enum
import importlib
import inspect
import os
import sys
import time
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import te_graphs
import te_kernels
import torch
from te_kernels import BACKWARD, FORWARD, DType
from torch.overrides import TorchFunctionMode


def absent(name: str) -> Any:
    def function(*arguments: Any, **keywords: Any) -> None:
        raise NotImplementedError(f"{name} is not stood in for")

    return function


class Members(type):
    """Of a class or an enumeration that only has to be named."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = len(vars(cls))  # one that no other has
        setattr(cls, name, value)
        return value


class Empty(types.ModuleType):
    """A module in which there is everything, and nothing that works."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return Members(name, (), {})
        return absent(f"{self.__name__}.{name}")


ACTIVATIONS = ("gelu", "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu", "swiglu")
NAMED = [f"{prefix}{name}" for name in ACTIVATIONS for prefix in ("", "d", "dbias_d")]
"""What TE puts into tables before it is called."""

CONSTANTS = {
    **{name: absent(name) for name in (*NAMED, "clamped_swiglu", "clamped_dswiglu")},
    "DType": DType,
    "FP8FwdTensors": enum.IntEnum("FP8FwdTensors", FORWARD, start=0),
    "FP8BwdTensors": enum.IntEnum("FP8BwdTensors", BACKWARD, start=0),
    "NVTE_Fused_Attn_Backend": enum.IntEnum(
        "NVTE_Fused_Attn_Backend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
    ),
    "get_fused_attn_backend": lambda *_, **__: (-1, "no kernel here"),
    "get_cublasLt_version": lambda: 130101,
    "get_cudnn_version": lambda: 92000,
    "get_num_cublas_streams": lambda: 4,
}

KERNELS = {name: one for name, one in vars(te_kernels).items() if inspect.isfunction(one) and name[0] != "_"}


class Event:
    """Of a device that has done everything at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._time = 0.0

    def record(self) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, later: "Event") -> float:
        return (later._time - self._time) * 1000


READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "nonzero")
IN_MEMORY = ("batch.py", "feed.py:update", "te_kernels.py", "te_blocks.py", "te_graphs.py")


class OnCpu(TorchFunctionMode):
    """What is asked of "cuda", or of device 0, is done on the CPU, and says that it is on CUDA. While nothing is to be
    waited for, no number of a tensor is read, but by stand-ins and of what lies in memory on a GPU machine, too."""

    reads = True

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if function == torch.Tensor.is_cuda.__get__:
            return True
        if name in ("cuda", "pin_memory"):
            return arguments[0]
        if name in READS and not self.reads and not _reader().startswith(IN_MEMORY):
            raise RuntimeError(f"{_reader()} waits for the device")
        keywords = {key: _cpu(value) for key, value in (keywords or {}).items()}
        if keywords.get("device") == 0:
            keywords["device"] = "cpu"
        return function(*map(_cpu, arguments), **keywords)


def _reader() -> str:
    """Where a number is read: the file below its package's folder, and the function."""
    frame = sys._getframe(2)
    while "/torch/" in frame.f_code.co_filename and frame.f_back:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"


def _cpu(value: Any) -> Any:
    is_cuda = (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.partition(":")[0] == "cuda"
    )
    return torch.device("cpu") if is_cuda else value


def _enter_packages() -> None:
    """The stand-in for compiled code, and empty modules for kernels in Triton and for ONNX, needed by no linear."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # TE's own switch: its library is not looked for
    os.environ |= {"NVTE_TORCH_COMPILE": "0", "NVTE_MASKED_SOFTMAX_FUSION": "0", "NVTE_UnfusedDPA_Emulate_FP8": "1"}
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]
    extension = Empty("transformer_engine_torch")
    vars(extension).update(CONSTANTS | KERNELS)
    sys.modules["transformer_engine_torch"] = extension
    root = Path(common.__file__).parents[1]  # type: ignore[arg-type]
    kernels = [
        path.relative_to(root) for part in ("common", "pytorch") for path in (root / part / "triton").glob("*.py")
    ]
    for path in (*kernels, Path("pytorch/onnx_extensions.py")):
        name = ".".join(("transformer_engine", *path.with_suffix("").parts)).removesuffix(".__init__")
        sys.modules[name] = Empty(name)


def _pretend_cuda() -> None:
    of_hopper = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="none", total_memory=2**30)
    answers = {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_device_properties": of_hopper,
        "get_device_name": "a CPU that stands in",
        "synchronize": None,
        "is_current_stream_capturing": False,
        "reset_peak_memory_stats": None,
        "max_memory_allocated": 0,
        "mem_get_info": (2**40, 2**40),
        "_lazy_init": None,
        "_lazy_call": None,
        "get_rng_state": torch.get_rng_state(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.Event = Event  # type: ignore[misc,assignment]
    torch.cuda.set_sync_debug_mode = lambda mode: setattr(OnCpu, "reads", mode != "error")  # type: ignore[assignment]
    torch.cuda.default_generators = (torch.default_generator,)
    torch.version.cuda = "13.0"


def _in_backward_too() -> None:
    """A mode is left for the functions that it is told of, and one of them runs the backward."""
    run = torch.autograd._engine_run_backward

    def within(*arguments: Any, **keywords: Any) -> Any:
        with OnCpu():
            return run(*arguments, **keywords)

    torch.autograd._engine_run_backward = within


def install() -> None:
    """Enter the stand-ins, for good, and import TE, which warns of what it misses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _enter_packages()
        _pretend_cuda()
        te_graphs.install()
        _in_backward_too()
        OnCpu().__enter__()
        importlib.import_module("transformer_engine.pytorch")
        te_graphs.after_import()


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """As a plugin, `python -m pytest -p te_on_cpu tests/gpu`."""
    install()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    try:
        return (yield)
    except NotImplementedError as missing:
        pytest.skip(str(missing))
