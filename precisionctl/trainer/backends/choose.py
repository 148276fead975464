"""Choose the backend that this machine can run, and make it."""

from contextlib import suppress
from importlib import metadata
from typing import Literal

import torch

from precisionctl.errors import EnvironmentProblem
from precisionctl.precision import PRESETS, Precision
from precisionctl.trainer.backends.base import Backend
from precisionctl.trainer.backends.te_version import TE_FLOOR, version_parts
from precisionctl.trainer.parallel.world import ALONE, World

BackendName = Literal["te", "emulated"]


def choose_backend(
    asked: Literal["te", "emulated", "auto"], precision: Precision = PRESETS["fp8-delayed"]
) -> BackendName:
    """The backend to use; `auto` means Transformer Engine if it can run FP8 here, else emulation. Raises
    EnvironmentProblem, with the reason, if `te` is asked for and cannot run, or if Transformer Engine runs here but
    not this FP8 recipe."""
    if asked == "emulated":
        return "emulated"
    problem = _te_problem()
    if problem and asked == "auto":
        return "emulated"
    if problem:
        codes = precision.codes
        raise EnvironmentProblem(
            f"Transformer Engine cannot run {codes} here: {problem.rstrip('.')}",
            do=f"Use `--backend emulated`, or a machine with a GPU that computes in {codes} and `precisionctl[te]` "
            "installed.",
        )
    if precision.fp8:
        from precisionctl.trainer.backends import te_backend

        if problem := te_backend.recipe_problem(precision):
            raise EnvironmentProblem(
                f"Transformer Engine cannot run precision.scaling = {precision.scaling} here: {problem.rstrip('.')}",
                do="Choose another scaling, or use `--backend emulated`, which is slow.",
            )
    return "te"


def _te_problem() -> str | None:
    """Why Transformer Engine cannot run FP8 here; None if it can."""
    with suppress(metadata.PackageNotFoundError):  # then importing it raises the reason
        installed = metadata.version("transformer-engine")
        if version_parts(installed) < TE_FLOOR:
            return f"version {installed} is too old, {'.'.join(map(str, TE_FLOOR))} or newer is needed"
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        from precisionctl.trainer.backends import te_backend
    except (ImportError, RuntimeError, OSError) as problem:  # TE's empty metapackage raises RuntimeError
        return str(problem)
    return te_backend.fp8_problem()


def make_backend(
    name: BackendName,
    precision: Precision,
    dtype: torch.dtype,
    device: torch.device,
    world: World = ALONE,
    *,
    fp8_weights: bool = False,
) -> Backend:
    """A backend whose modules have parameters of `dtype` on `device`; FP8 state is the same on all ranks of `world`.

    With `fp8_weights`, for inference under delayed scaling, weights of FP8 GEMMs are stored only as codes. They are
    cast when they are loaded, with the scale in the state, so set the state first."""
    if name == "te":
        from precisionctl.trainer.backends.te_backend import TransformerEngineBackend

        return TransformerEngineBackend(precision, dtype, device, world, fp8_weights=fp8_weights)
    from precisionctl.trainer.backends.emulated import EmulatedBackend

    return EmulatedBackend(precision, dtype, device, world, fp8_weights=fp8_weights)
