"""Fixed input scales from recorded FP8 state, and FP8 state from fixed input scales."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings
from precisionctl.engines.serving import fused
from precisionctl.errors import MissingFp8State, Unrecordable
from precisionctl.fp8.delayed_scaling import after_one_update, recorded_amax
from precisionctl.fp8.state import FIXED_SCALES, DelayedScaling, Fp8State, Fp8States
from precisionctl.planning.plan import Job, Plan
from precisionctl.sizes import counted
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

_BY_ENGINE = "let the engine scale inputs: `export-inference --scheme dynamic` (of four bits: nvfp4a16)."
_RECORD = (
    "Record it with `precisionctl calibrate` and give --fp8-state, train a few steps with `precisionctl resume "
    f"--precision fp8`, or {_BY_ENGINE}"
)


def input_amaxes(
    states: Fp8States | None, jobs: Sequence[Job], why_no_state: str, *, tabled: bool = True
) -> dict[str, Tensor]:
    """The largest recorded amax, FP32 `[]`, of the input of each of the jobs' modules, over all experts. Raises
    MissingFp8State for an input that was never recorded; `why_no_state` says why there is no state. If it is in a layer
    of multi-token prediction, of a weight that is codes in exports alone, or the model is not `tabled`, no command
    records it, and this is Unrecordable. What engines compute as one has one input."""
    recorded = {fused(job.writes[0]) for job in jobs if job.row.gemm}
    exported = [job.writes[0] for job in jobs if job.row.only_exported and fused(job.writes[0]) not in recorded]
    if exported:
        kinds = dict.fromkeys("*." + name.removesuffix(".weight").rpartition(".")[2] for name in exported)
        left = " ".join(f"--exclude '{kind}'" for kind in kinds)
        what = f"no command records the input of `{exported[0]}`, which no recipe multiplies in FP8"
        raise Unrecordable(what, do=f"{left} leaves such weights in BF16. Or {_BY_ENGINE}")
    if states is None:
        modules = dict.fromkeys(job.module for job in jobs)
        of = f"{counted(len(modules), 'module')}, e.g. `{next(iter(modules), '')}`,"
        what = f"{why_no_state}: scales for the inputs of {of} are unknown"
        if tabled:
            raise MissingFp8State(what, do=_RECORD)
        nobody = "No command records it for a model without a table (docs/any_model.md)"
        raise Unrecordable(what, do=f"{nobody}, so {_BY_ENGINE}")
    amaxes = {}
    for job in jobs:
        if job.row.unused or job.row.only_exported:  # what engines fuse it with has its input
            continue
        state = states.modules.get(job.module)
        amax = recorded_amax(state.roles["input"], "input", states.recipe).amax() if state else torch.zeros(())
        if not amax > 0:
            what = f"the input of `{job.module}` was never recorded"
            if job.row.of_prediction:
                raise Unrecordable(f"{what}, as {OF_PREDICTION}: {prediction_in_bf16(jobs)}", do=f"Or {_BY_ENGINE}")
            raise MissingFp8State(what, do=_RECORD)
        amaxes[job.module] = amax
    return amaxes


OF_PREDICTION = "nothing here computes layers of multi-token prediction"


def prediction_in_bf16(jobs: Sequence[Job]) -> str:
    """How an export leaves layers of multi-token prediction in BF16: each by the start of its tensors' names, to the
    first number."""
    names = [name for job in jobs if job.row.of_prediction and job.row.gemm for name in job.writes]
    layers = dict.fromkeys(re.sub(r"(\.\d+\.).*", r"\1*", name) for name in names)
    return " ".join(f"--exclude '{layer}'" for layer in layers) + " leaves these layers in BF16"


def unreached_experts(states: Fp8States | None, jobs: Sequence[Job]) -> int:
    """The number of experts, among the jobs' modules, whose inputs were never recorded because no token reached
    them."""
    found = 0
    for module in dict.fromkeys(job.module for job in jobs if job.row.of_experts):
        state = states.modules.get(module) if states else None
        if states and state:
            found += int((recorded_amax(state.roles["input"], "input", states.recipe) == 0).sum())
    return found


OF_ONE_STEP = "the FP8 state keeps the amaxes of one step alone, which later inputs may well exceed"
"""Measured: scales from such a state, Megatron-LM's default, were 0.52 to 0.81 of calibrated ones."""


WITH_ROUTERS = (
    "the FP8 state is of Megatron-Core's passes, where inputs of experts' linear_fc2 are multiplied by the router's "
    "weights, and engines multiply after it"
)


def why_too_small(states: Fp8States) -> str:
    """Why the recorded amaxes may be too small for the inputs to come; empty if there is no known reason."""
    if states.recipe.amax_history_len == 1:
        return OF_ONE_STEP
    return WITH_ROUTERS if states.has_router_weights else ""


_TWO_ROUNDINGS = 2.0**-22


def is_same_amax(one: float, other: float) -> bool:
    """Whether the amax that a fixed scale stands for is one that was recorded. Each may have been stored as a scale and
    computed back from it, with a relative error of two roundings: the former as a divisor, the latter in a history of
    one row, Megatron's default."""
    return math.isclose(one, other, rel_tol=_TWO_ROUNDINGS)


def state_of_input_scales(reader: Reader, encodings: WeightEncodings | None, plan: Plan) -> Fp8States | None:
    """FP8 state made from the calibrated input scales of an FP8 directory, each of which stands for an amax. Of a fused
    group the largest is used; experts have one each. None if there are no such scales."""
    if encodings is None or reader.layout != "hf" or not reader.encodings:
        return None
    given: dict[str, list[float]] = {}
    for job in plan.jobs:
        found = [encodings.input_amax(name) for name in job.reads if name in encodings.scales]
        if job.row.gemm:
            given.setdefault(job.module, []).append(
                max((float(amax) for amax in found if amax is not None), default=0.0)
            )
    recipe, modules = DelayedScaling(), {}
    for module, shape in plan.gemms.items():
        if any(given[module]):
            amaxes = torch.tensor(given[module]).reshape(shape)
            fresh = Fp8State.fresh(recipe.amax_history_len, shape)
            modules[module] = Fp8State({**fresh.roles, "input": after_one_update(amaxes, "input", recipe)})
    method = encodings.quantization.get("quant_method")
    if not modules:
        return None
    return Fp8States(recipe, modules, producer=f"{FIXED_SCALES}{method}", of_weights=encodings.of_weights)
