"""How `export-inference` is planned for an inference engine."""

from collections.abc import Mapping
from functools import partial
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
    reencoding_notes,
)
from precisionctl.commands.open_source import open_source
from precisionctl.commands.plan_te_export import TE, plan_te
from precisionctl.commands.writers import hf_writer
from precisionctl.conversion.work import Work, digest_of, open_output
from precisionctl.engines.base import Engine, engines
from precisionctl.errors import PrecisionError, RecipeError
from precisionctl.export import kv_cache
from precisionctl.export.export import Export, Format, make_export
from precisionctl.export.model_card import NAME, Card, beside
from precisionctl.export.reencode import in_powers_of_2
from precisionctl.export.refused_shapes import served
from precisionctl.export.schemes import best_scheme
from precisionctl.export.weight_encodings import weight_encodings
from precisionctl.fp8.numerics import Numbers
from precisionctl.quant_methods.base import Scheme, quant_methods


def plan_export(export: InferenceExport) -> Work:
    """Plan `export-inference`. Raises MissingFp8State where `static` needs amaxes that were never recorded,
    PrecisionError for what the engine does not take, and what opening and planning raise."""
    reader = open_source(export.source, export.iteration, architecture=export.architecture, reference=export.reference)
    return plan_export_of(reader, weight_encodings(reader), export)


def plan_export_of(reader: Reader, encodings: WeightEncodings | None, export: InferenceExport) -> Work:
    """Plan the export of an open source; `encodings` is how its weights are FP8 codes, or were. Raises as
    `plan_export`."""
    if export.target == TE:
        return plan_te(reader, encodings, export)
    engine = engine_named(export.target)
    source = export_source(reader, encodings, export)
    form, notes = _format(source, engine, export)
    notes += known_state_notes(source.known, carried=False)
    made = _make(source, engine, form, export)
    if export.kv_cache:
        kv_cache.check_engine(source.plan, engine, form.method)
        made = kv_cache.with_cache(made, form, kv_cache.recorded_scales(source.recorded, source.fixed, source.plan))
        notes += kv_cache.notes(engine, form.method, source.recorded)
    else:
        notes += kv_cache.left_out(encodings, source.plan)
    output = open_output(export.destination, export.source, export.reference, export.fp8_state)
    writer = hf_writer(
        output,
        made.plan,
        reader.companions,
        export=made,
        max_shard_size=export.max_shard_size,
        files={NAME: _card(made, engine, form, source, export).text(reader)},
        lacks=engine.lacks,
    )
    serve = engine.serve(export.destination, export.ranks, fp8_cache=export.kv_cache is not None)
    notes += [*left_behind_notes(reader), *made.notes, *missing_notes(reader), *companion_notes(reader)]
    notes.append(f"Serve it with: {serve}")

    def finish(changed: Mapping[str, float]) -> None:
        notes.extend(reencoding_notes(encodings, made.codes, changed) if encodings else ())

    digest = digest_of(made.plan, export, export.fp8_state, encodings)
    return Work(reader, made.plan, writer, output, finish, digest, notes, encodings=encodings)


def _format(source: ExportSource, engine: Engine, export: InferenceExport) -> tuple[Format, list[str]]:
    """How weights are coded and spelled, and what to tell of that. Raises PrecisionError for a scheme that the engine
    does not take, RecipeError for state that a scheme has no use for."""
    scheme, notes = export.scheme, []
    if scheme is None:
        scheme, why = best_scheme(
            engine, source.plan, source.precision(export), source.states, source.codes, source.known.why_none
        )
        notes.append(f"Scheme {scheme}: {why}.")
    if scheme not in engine.spells:
        raise PrecisionError(f"no {scheme} for {engine.title}", do=f"Choose --scheme {' or '.join(engine.spells)}.")
    if scheme == "static":
        notes += input_scale_notes(source.recorded, export.fp8_state)
    elif export.fp8_state and not export.kv_cache:
        raise RecipeError(
            f"under {scheme} the engine makes input scales itself, without FP8 state", do="Leave --fp8-state out."
        )
    numbers: Numbers = "BF16" if engine.spells[scheme] in engine.bf16_scales else "FP32"
    if scheme == "block" and source.codes is not None and in_powers_of_2(source.codes):
        numbers = "powers of 2"
    return Format(quant_methods()[engine.spells[scheme]], scheme, numbers), notes


def _make(source: ExportSource, engine: Engine, form: Format, export: InferenceExport) -> Export:
    """The export's plan. Raises what `make_export` raises, and PrecisionError for experts that the engine does not
    load."""
    refusal = partial(engine.refusal, scheme=form.scheme, served=served(source.plan, export.ranks))
    made = make_export(
        source.plan,
        source.states,
        form,
        source.precision(export),
        refusal,
        keep_refused=export.keep_misfits,
        why_no_state=source.known.why_none,
    )
    if found := engine.check_experts(made.codes, form.method.name, form.scheme):
        raise PrecisionError(
            f"{engine.title} does not load {found[0].what}",
            where=found[0].where,
            do="Export with --scheme static or block, or name the experts in keep_bf16 of a --recipe.",
        )
    return made


_SCHEMES: Mapping[Scheme, str] = {
    "static": "one scale for a weight, one for all its inputs",
    "dynamic": "one scale for an output channel of a weight, one for a token of inputs",
    "block": "one scale for 128 x 128 values of a weight, one for 128 of inputs",
    "mxfp8": "a power of two for 32 values of a weight or of inputs",
}


def _card(made: Export, engine: Engine, form: Format, source: ExportSource, export: InferenceExport) -> Card:
    """What the model card says of an export."""
    recorded, code = source.recorded, source.reader.companions.code
    file = Path(export.fp8_state.name) if export.fp8_state else None
    inputs = input_scale_notes(recorded, file) if form.scheme == "static" else ("Input scales are made by the engine.",)
    facts = {
        "weights": "float8_e4m3fn",
        "format": form.method.name,
        "scheme": f"{form.scheme}: {_SCHEMES[form.scheme]}",
        "input scales": " ".join(inputs),
        "KV cache": "FP8, its scales stored" if export.kv_cache else "no scales stored",
    }
    if code:
        facts["code of its own"] = f"{', '.join(code)}: the engine needs to be told to trust it"
    name = export.destination.name
    command = engine.serve(beside(name), export.ranks, fp8_cache=export.kv_cache is not None)
    return Card(name, engine.title, engine.name, command, facts, made.codes, made.kept, export.base_model)


def engine_named(name: str) -> Engine:
    """The engine of a name. Raises PrecisionError, with the known names, for another."""
    known = engines()
    if name not in known:
        raise PrecisionError(f"no engine `{name}`", do=f"Known: {', '.join((*known, TE))}.")
    return known[name]
