"""The target of `export-inference` that is no engine: Transformer Engine, under PyTorch.

Its directory is the Hugging Face model in BF16, with the delayed-scaling state of each FP8 GEMM beside it ("calibrated
extra data"): `te.load_te` makes the model's linears modules of Transformer Engine that start with that state.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.encodings_file import WeightEncodings
from precisionctl.commands.export_source import ExportSource, export_source
from precisionctl.commands.inference_export import InferenceExport
from precisionctl.commands.notes import (
    companion_notes,
    input_scale_notes,
    known_state_notes,
    left_behind_notes,
    missing_notes,
)
from precisionctl.commands.writers import hf_writer
from precisionctl.conversion.work import Work, digest_of, open_output
from precisionctl.errors import MissingFp8State, RecipeError
from precisionctl.export.export import fp8_jobs
from precisionctl.export.input_scales import input_scales
from precisionctl.export.model_card import NAME, Card, beside
from precisionctl.fp8.carry import amax_by_module, check_modules, from_other_experts
from precisionctl.fp8.numerics import after_one_update
from precisionctl.fp8.state import Fp8State, Fp8States
from precisionctl.planning.plan import Plan, check_fp8_gemms
from precisionctl.precision import Precision

TE = "te"
_TITLE = "PyTorch with Transformer Engine"


def plan_te(reader: Reader, encodings: WeightEncodings | None, export: InferenceExport) -> Work:
    """Plan the export of an open source.

    Scales of weights are those of the weights that are written, whatever was recorded of them. Raises MissingFp8State
    where an input was never recorded, MappingError for state of another model, RecipeError for options that mean
    nothing to this target, PrecisionError for sizes that no FP8 GEMM takes.
    """
    _check_options(export)
    source = export_source(reader, encodings, export, export.recipe.delayed if export.recipe else None)
    plan, recorded = source.plan, source.recorded
    states = _of_gemms(source, source.precision(export))
    output = open_output(export.destination, export.source, export.reference, export.fp8_state)
    writer = hf_writer(
        output,
        plan,
        reader.companions,
        max_shard_size=export.max_shard_size,
        live=True,
        files={NAME: _card(plan, states, recorded, export).text(reader)},
    )
    notes = [*known_state_notes(source.known, carried=False), *input_scale_notes(recorded, export.fp8_state)]
    notes += [*left_behind_notes(reader), *missing_notes(reader), *companion_notes(reader)]
    notes.append(f'Load it with: precisionctl.te.load_te("{export.destination}")')

    def finish(found: Mapping[str, float]) -> Fp8States:
        gemms = {module: shape for module, shape in plan.gemms.items() if module in states.modules}
        modules = {}
        for module, amax in amax_by_module(found, gemms).items():
            stored = amax.bfloat16().float()  # as the weights are rounded, so is the largest of them
            weight = after_one_update(stored, "weight", states.recipe)
            modules[module] = Fp8State({**states.modules[module].roles, "weight": weight})
        return replace(states, modules=modules)

    digest = digest_of(plan, export, export.fp8_state, encodings)
    return Work(reader, plan, writer, output, finish, digest, notes, wants_amax=True)


def _card(plan: Plan, states: Fp8States, recorded: Fp8States | None, export: InferenceExport) -> Card:
    """What the model card says of it."""
    file = Path(export.fp8_state.name) if export.fp8_state else None
    facts = {
        "weights": "bfloat16, cast to float8_e4m3fn when it is loaded",
        "scheme": "delayed scaling, with its state",
        "input scales": " ".join(input_scale_notes(recorded, file)),
    }
    in_state = [name for job in plan.jobs if job.row.gemm and job.module in states.modules for name in job.writes]
    matrices = [name for name, spec in plan.targets.items() if len(spec.shape) == 2]
    kept = [name.removesuffix(".weight") for name in matrices if name not in in_state]
    name = export.destination.name
    command = f"from precisionctl.te import load_te\n\nmodel = load_te({json.dumps(beside(name))})"
    return Card(name, _TITLE, "transformer-engine", command, facts, in_state, kept, export.base_model)


def _check_options(export: InferenceExport) -> None:
    if export.scheme not in (None, "static"):
        raise RecipeError(f"{_TITLE} is given state, which {export.scheme} has none of", do="Leave --scheme out.")
    if export.recipe and export.recipe.scaling != "delayed":
        raise RecipeError(f"{export.recipe.scaling} scaling keeps no state", do="Give a recipe of delayed scaling.")
    if export.kv_cache or export.keep_misfits or export.ranks > 1:
        raise RecipeError(
            f"--kv-cache, --keep-misfits and --tp do not apply to {_TITLE}",
            do="Leave them out; keep_bf16 in a --recipe.",
        )


def _of_gemms(source: ExportSource, precision: Precision) -> Fp8States:
    """The state of every module that the recipe computes in FP8. An expert that no token has reached gets the largest
    amax of the others. Raises MissingFp8State where the input of a module was never recorded, MappingError for state of
    another number of experts."""
    plan, states = source.plan, source.states
    jobs = fp8_jobs(plan, precision)
    check_fp8_gemms(plan, precision)
    try:
        input_scales(states, jobs, source.known.why_none)
    except MissingFp8State as missing:
        do = "Record it with `precisionctl calibrate` and give --fp8-state, or train a few steps in FP8."
        raise MissingFp8State(missing.what, do=do) from missing
    assert states is not None, "inputs of none are missing"
    modules = {}
    for module in dict.fromkeys(job.module for job in jobs):
        roles = dict(states.modules[module].roles)
        roles["input"] = from_other_experts(roles["input"], "input", states.recipe)
        modules[module] = Fp8State(roles)
    made = replace(states, modules=modules, raw={}, statistics={})
    check_modules(made, plan.gemms)
    return made
