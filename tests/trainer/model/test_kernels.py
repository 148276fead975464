"""Where Triton's kernels cannot run, PyTorch computes; `tests/gpu` and `tests/peers` have the kernels themselves."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from pico import shape

from precisionctl.trainer.model import kernels, mlp


@pytest.fixture(autouse=True)
def asked_anew() -> None:
    kernels._that_run.cache_clear()


class OnGpu(torch.Tensor):
    is_cuda = True


def test_there_are_none_on_a_cpu_and_none_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert kernels.kernels_for(torch.ones(1)) is None
    assert kernels.kernels_for(OnGpu()) is None


@pytest.mark.parametrize(
    "problem", [RuntimeError("Failed to find C compiler.\nSet CC."), torch.OutOfMemoryError("full")]
)
def test_what_keeps_them_from_running_is_told_once(problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def log_sums(*_: object) -> None:
        raise problem

    made = ModuleType("gpu_kernels")
    made.log_sums = log_sums  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "precisionctl.trainer.model.gpu_kernels", made)
    monkeypatch.setattr("precisionctl.trainer.model.gpu_kernels", made, raising=False)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(1, 1))
    if isinstance(problem, torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError):
            kernels.kernels_for(OnGpu())
        return
    with pytest.warns(
        UserWarning, match="do not run here, so training takes longer: RuntimeError: Failed to find C comp"
    ):
        assert kernels.kernels_for(OnGpu()) is None
    assert kernels.kernels_for(OnGpu()) is None


def test_layers_without_a_clamp_have_the_kernel_of_swiglu_beside_layers_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Step 3.5's: of dense MLPs and shared experts, the first layer and the last clamp, of routed experts the last
    two."""
    kernel = SimpleNamespace(SwiGLU=SimpleNamespace(apply=lambda values: "the kernel's"))
    monkeypatch.setattr(mlp, "kernels_for", lambda values: kernel)
    model, values = shape("step3p5"), torch.ones(1, 2)
    for here, clamps in ((model, [True, False, False, True]), (model.of_experts, [False, False, True, True])):
        assert [mlp.activate(values, here, layer) != "the kernel's" for layer in range(4)] == clamps
