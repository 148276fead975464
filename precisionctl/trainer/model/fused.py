"""Chains of operations on single numbers as one kernel on a GPU, by torch.compile."""

import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def fused(function: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """`function`, which reads and writes its operands once on a GPU, instead of once for each of its operations. What
    it rounds to BF16 on the way it still rounds. Where the first operand is on a CPU, or nothing can be compiled,
    `function` as it is."""

    @cache
    def compiled() -> Callable[Concatenate[Tensor, P], R]:
        return torch.compile(function, fullgraph=True, options={"emulate_precision_casts": True})

    @wraps(function)
    def called(first: Tensor, /, *others: P.args, **named: P.kwargs) -> R:
        chosen = compiled() if first.is_cuda and _compiles() else function
        return chosen(first, *others, **named)

    return called


@cache
def _compiles() -> bool:
    """Whether torch.compile works here: Triton wants a C compiler, and Python's headers."""
    try:
        torch.compile(lambda values: values + 1)(torch.ones(1, device="cuda"))
    except Exception as problem:  # of Triton, of Inductor or of the compiler
        why = f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"
        warnings.warn(f"torch.compile does not work here, so training is slower than it could be: {why}", stacklevel=2)
        return False
    return True
