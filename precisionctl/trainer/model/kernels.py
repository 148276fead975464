"""Whether Triton's kernels (`gpu_kernels.py`) can run."""

import warnings
from functools import cache
from types import ModuleType

import torch
from torch import Tensor


def kernels_for(values: Tensor) -> ModuleType | None:
    """The kernels, if `values` are on a GPU and they can run there. Triton comes with PyTorch for CUDA, and wants a C
    compiler and Python's headers, of which a warning tells that they are missing."""
    return _that_run() if values.is_cuda else None


@cache
def _that_run() -> ModuleType | None:
    try:
        from precisionctl.trainer.model import gpu_kernels
    except ImportError:
        return None
    try:
        gpu_kernels.log_sums(torch.zeros(1, 1, device="cuda"), 1)
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # whatever Triton, the compiler or the driver raises, PyTorch computes the same
        why = f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"
        warnings.warn(f"Triton's kernels do not run here, so training takes longer: {why}", stacklevel=2)
        return None
    return gpu_kernels
