"""The target of `export-inference` that is no engine: Transformer Engine, under PyTorch.

Its directory is the Hugging Face model in BF16, with the delayed-scaling state of each FP8 GEMM beside it ("calibrated
extra data"): `te.load_te` makes the model's linears modules of Transformer Engine that start with that state.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from precisionctl.commands.build import Result
from precisionctl.commands.notes import input_scale_notes, rounded_notes
from precisionctl.commands.request import OTHER_TARGETS, TE
from precisionctl.commands.run_precision import precision_of_export
from precisionctl.commands.source import Source
from precisionctl.commands.source_notes import kept_notes, source_notes
from precisionctl.errors import MissingFp8State, PrecisionError, Unrecordable
from precisionctl.export.encode import fp8_jobs
from precisionctl.export.input_scales import OF_PREDICTION, input_amaxes
from precisionctl.export.model_card import Card, path_in_command
from precisionctl.fp8.carry import amax_by_module, check_modules, from_other_experts
from precisionctl.fp8.delayed_scaling import after_one_update
from precisionctl.fp8.state import Fp8State, Fp8States
from precisionctl.planning.plan import Job, Plan, check_fp8_gemms


def with_te_state(source: Source) -> Result:
    """A result of values in BF16 that Transformer Engine computes with in FP8.

    Scales of weights are those of the weights that are written, whatever was recorded of them. Raises MissingFp8State
    where an input was never recorded, MappingError for state of another model, PrecisionError for sizes that no FP8
    GEMM takes.
    """
    request, reader, recorded = source.request, source.reader, source.known.current
    if wrapper := source.plan.model.wrapper:
        raise PrecisionError(
            f"`load_te` makes text models, and this is a `{wrapper.model_type}` around one",
            do="Export it for an engine, or `resume` from the run itself.",
        )
    precision, not_heeded = precision_of_export(request.recipe, source.trained_in, source.plan.model)
    jobs = fp8_jobs(source.plan, precision)
    check_fp8_gemms(source.plan, precision)
    states = _of_gemms(source, jobs)
    notes = [
        *source.known.notes,
        *input_scale_notes(recorded, request.fp8_state, file_is_noted=True),
        *source_notes(source),
        *kept_notes(source, jobs, options="a --recipe"),
        *not_heeded,
        *rounded_notes(reader, source.plan),
        f"Load it with: precisionctl.te.load_te({json.dumps(str(request.destination))})",
    ]

    plan, name = source.plan, request.destination.name
    file = Path(request.fp8_state.name) if request.fp8_state else None
    facts = {
        "weights": "bfloat16, cast to float8_e4m3fn when it is loaded",
        "scheme": "delayed scaling, with its state",
        "input scales": " ".join(input_scale_notes(recorded, file)),
    }
    in_state = [write for job in plan.jobs if job.row.gemm and job.module in states.modules for write in job.writes]
    matrices = [target for target, spec in plan.targets.items() if len(spec.shape) == 2]
    kept = [target.removesuffix(".weight") for target in matrices if target not in in_state]
    command = f"from precisionctl.te import load_te\n\nmodel = load_te({json.dumps(path_in_command(name))})"
    card = Card(name, OTHER_TARGETS[TE], "transformer-engine", command, facts, in_state, kept, request.base_model)
    return Result(
        plan, notes, partial(_with_weight_scales, states, plan), live=True, card=card, trained_in=source.run_precision
    )


def _of_gemms(source: Source, jobs: Sequence[Job]) -> Fp8States:
    """The state of the modules of these jobs, which compute in FP8. An expert that no token has reached gets the
    largest amax of the others."""
    plan, states = source.plan, source.states
    try:
        input_amaxes(states, jobs, source.known.why_none)
    except Unrecordable as missing:
        do = 'Leave these layers in BF16: keep_bf16 = ["mtp.*"] in a --recipe.'
        raise Unrecordable(f"the inputs of some layers were never recorded, as {OF_PREDICTION}", do=do) from missing
    except MissingFp8State as missing:
        do = "Record it with `precisionctl calibrate` and give --fp8-state, or train a few steps in FP8."
        raise MissingFp8State(missing.what, do=do) from missing
    assert states is not None, "inputs of none are missing"
    modules = {}
    for module in dict.fromkeys(job.module for job in jobs if not job.row.unused):
        roles = dict(states.modules[module].roles)
        roles["input"] = from_other_experts(roles["input"], "input", states.recipe)
        modules[module] = Fp8State(roles)
    made = replace(states, modules=modules, raw={}, statistics={})
    check_modules(made, plan.gemms)
    return made


def _with_weight_scales(
    states: Fp8States, plan: Plan, weight_amax: Mapping[str, float]
) -> tuple[Fp8States, Sequence[str]]:
    """The state, with the weight role's scales computed from the weights that are written."""
    gemms = {module: shape for module, shape in plan.gemms.items() if module in states.modules}
    modules = {}
    for module, amax in amax_by_module(weight_amax, gemms).items():
        stored = amax.bfloat16().float()  # as the weights are rounded, so is the largest of them
        weight = after_one_update(stored, "weight", states.recipe)
        modules[module] = Fp8State({**states.modules[module].roles, "weight": weight})
    return replace(states, modules=modules), ()
