"""CUDA graphs on a CPU, for `te_on_cpu.py`: what a capture sees is kept, operation by operation, and a replay makes all
of them once more, into the tensors that the capture made.

So a replay reads its inputs where they lay, as a graph does, and whatever the host decided is decided for good.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class Stream:
    """One of a device that does everything at once."""

    def wait_stream(self, other: Any) -> None:
        """Nothing to wait for."""

    wait_event = wait_stream


class CUDAGraph:
    """What TE asks of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def register_generator_state(self, state: Any) -> None:
        """Nothing is drawn."""

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for function, arguments, keywords, made in self.operations:
            again = function(*arguments, **keywords)
            for old, new in zip(_tensors(made), _tensors(again), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():  # neither a view nor in place
                    old.copy_(new)

    def reset(self) -> None:
        self.operations.clear()


class _Captured(TorchDispatchMode):
    def __init__(self, graph: CUDAGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        made = function(*arguments, **keywords)
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the host reads a number while a graph is captured")
        self._graph.operations.append(tree_map(_held, (function, arguments, keywords, made)))
        return made


def _held(value: Any) -> Any:
    """A tensor where it lies now: TE lets go of what a backward has read, by putting an empty tensor into its place."""
    return value.detach() if type(value) in (Tensor, nn.Parameter) else value


def _tensors(made: Any) -> list[Tensor]:
    listed = made if isinstance(made, tuple | list) else [made]
    return [each for each in listed if isinstance(each, Tensor)]


@contextmanager
def captured(graph: CUDAGraph, pool: Any = None) -> Iterator[None]:
    """`torch.cuda.graph`."""
    with _Captured(graph):
        yield


def install() -> None:
    """Before TE is imported."""
    stream = Stream()
    torch.cuda.CUDAGraph = CUDAGraph  # type: ignore[misc,assignment]
    torch.cuda.graph = captured  # type: ignore[misc,assignment]
    torch.cuda.Stream = Stream  # type: ignore[misc,assignment]
    torch.cuda.stream = lambda _: nullcontext()  # type: ignore[assignment]
    torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment]


def after_import() -> None:
    sys.modules["transformer_engine.pytorch.graph"].graph_pool_handle = lambda: None  # type: ignore[attr-defined]
