"""A directory held against what `te.load_te` and Transformer Engine's modules ask of an export for them. Whether
transformers' class has a module for each GEMM with state is no question of the directory: `load_te` has the class."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.chunks import in_pieces, read_rows
from precisionctl.codes import numerics
from precisionctl.engines.rules.rule import EngineRule, Finding
from precisionctl.errors import DamagedCheckpoint, UnknownFormat
from precisionctl.fp8 import delayed_scaling, sidecar
from precisionctl.fp8.state import Fp8State, Fp8States
from precisionctl.param import GEMM_ALIGNMENT, gemm_misfit
from precisionctl.planning.plan import Job, Plan
from precisionctl.torch_when_used import torch
from precisionctl.verify.engine_rules import CheckableDirectory

PIECE = 1 << 22
"""Elements of a weight to read at a time."""

_FILE = EngineRule(f"the state of its GEMMs is in {sidecar.LIVE}, sound and whole", "precisionctl te.load_te")
_VALUES = EngineRule(
    "weights are values, which it casts itself; of codes transformers would make linears of its own",
    "Transformer Engine 2.20 pytorch/module/linear.py; transformers 5.24 quantizers",
)
_MODULES = EngineRule(
    "state is of a GEMM of the model, with one scale, or one for each expert",
    "Transformer Engine 2.20 pytorch/quantization.py DelayedScalingRecipeState, module/grouped_linear.py",
)
_ALIGNED = EngineRule(
    f"both dimensions of an FP8 weight must be multiples of {GEMM_ALIGNMENT}",
    "Transformer Engine 2.20 pytorch/utils.py assert_dim_for_fp8_exec; cuBLASLt",
)
_RECORDED = EngineRule(
    "an input of which nothing was recorded is cast under a scale of 1",
    "Transformer Engine 2.20 pytorch/quantization.py DelayedScalingRecipeState",
    fatal=False,
)
_FITTING = EngineRule(
    "weights are cast by the scale that is stored, and saturate beyond it",
    "Transformer Engine 2.20 pytorch/tensor/float8_tensor.py Float8Quantizer",
    fatal=False,
)


def check_te(reader: Reader, planned: Callable[[], Plan | Finding]) -> list[Finding]:
    """Every rule that a Hugging Face directory breaks. `planned` makes the plan to Megatron's names; where it finds
    that tensors are not the model's, only what is asked of files is checked. Raises UnknownFormat for other containers,
    which may not say their model, before it plans."""
    if not isinstance(reader, CheckableDirectory):
        raise UnknownFormat(
            f"Transformer Engine reads Hugging Face directories, and this is {reader.container}",
            where=reader.path,
            do=f"Make one: precisionctl export-inference {shlex.quote(str(reader.path))} DST --target te",
        )
    if reader.config.get("quantization_config"):
        return [Finding("config.json", "a quantization_config", _VALUES)]
    try:
        states = sidecar.find(reader.path, sidecar.LIVE)
    except DamagedCheckpoint as damage:
        return [Finding(str(sidecar.LIVE), damage.what, _FILE)]
    if states is None:
        return [Finding(str(sidecar.LIVE), "not there", _FILE)]
    plan = planned()
    if not isinstance(plan, Plan):
        return []

    found: list[Finding] = []
    gemms = plan.gemms
    for name, state in states.modules.items():
        if name not in gemms:
            found.append(Finding(name, "state of no GEMM of the model", _MODULES))
        elif any(part.scale.shape != gemms[name] for part in state.roles.values()):
            found.append(Finding(name, f"scales of shape {list(state.shape)}, not {list(gemms[name])}", _MODULES))
        elif not bool((delayed_scaling.recorded_amax(state.roles["input"], "input", states.recipe) > 0).all()):
            found.append(Finding(name, "an input that was never recorded", _RECORDED))

    for job in plan.jobs:
        of_job = states.modules.get(job.module) if job.row.gemm else None
        if of_job is None or of_job.roles["weight"].scale.shape != gemms[job.module]:
            continue
        for name in job.reads:
            shape = reader.specs[name].shape
            if gemm_misfit(shape):
                found.append(Finding(name, f"shape {list(shape)}", _ALIGNED))
            elif (over := _beyond(name, job, of_job, states, reader)) > 1 + 2**-20:  # the scale is a rounded quotient
                what = f"values up to {over:.4g} times the largest that its scale is for"
                found.append(Finding(name, what, _FITTING))
    return found


def _beyond(name: str, job: Job, state: Fp8State, states: Fp8States, reader: Reader) -> float:
    """The largest magnitude of a weight, divided by the value of the largest code under its scale."""
    scale = state.roles["weight"].scale
    one = scale if job.expert is None else scale[job.expert]
    spec, amax = reader.specs[name], torch.zeros(())
    for row, rows in in_pieces(0, spec.rows, spec.columns, PIECE):
        amax = torch.maximum(amax, numerics.amax(read_rows(reader, name, row, rows)))
    return float(amax * one / numerics.largest_code(states.recipe.dtype("weight")))
