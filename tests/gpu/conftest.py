"""Everything here needs Transformer Engine on a GPU with FP8, and is skipped, with the reason, elsewhere.

`tests/peers/test_te_on_cpu.py` runs it without a GPU, over TE's own Python and stand-ins for its kernels.
"""

import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from precisionctl.errors import EnvironmentProblem
from precisionctl.trainer.backends.choose import choose_backend


@cache
def problem() -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what TE warns of when it is imported
        try:
            choose_backend("te")
        except EnvironmentProblem as found:
            return found.what
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = problem()
    for item in here:
        item.add_marker(pytest.mark.filterwarnings("default"))  # TE's warnings are no failures of ours
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure() -> None:
    problem()  # imported before the collection, where warnings are errors


@pytest.fixture(autouse=True)
def forgotten_modules() -> Iterator[None]:
    """TE's global buffers keep the state of every module that has run in FP8, and update all of it in each pass."""
    yield
    if not problem():
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()


@pytest.fixture
def same_order() -> Iterator[None]:
    """Sums of attention's backward in the same order each time, which costs time."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def exact_fp32_products() -> Iterator[None]:
    """The emulation multiplies code values in FP32; TF32 would round E5M2 sums."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
