"""PyTorch, imported when something is first asked of it: importing takes 1.6 s of CPU and 200 MB, and commands that
only read headers, plan, or move bytes do not need it.

A file that such a command imports takes its `torch` from here, uses it in functions only, and imports `Tensor` for type
checkers alone.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import torch
else:

    class _WhenUsed:
        def __getattr__(self, name: str) -> Any:
            import torch

            value = getattr(torch, name)
            setattr(self, name, value)  # so that it is asked once
            return value

    torch = _WhenUsed()


def is_tensor(value: object) -> "TypeGuard[torch.Tensor]":
    """Whether a value is a tensor, without importing PyTorch to ask: before anything has, there are none."""
    imported = sys.modules.get("torch")
    return imported is not None and isinstance(value, imported.Tensor)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Limit PyTorch to one thread: on small pieces its own take several times the CPU, and where workers run beside one
    another they compete."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


__all__ = ["is_tensor", "one_torch_thread", "torch"]
