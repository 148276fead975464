"""How `export-inference` is planned."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.encodings_file import Coded
from precisionctl.commands.inference_export import InferenceExport
from precisionctl.commands.notes import left_behind, of_companions, of_input_scales, of_way_back
from precisionctl.commands.open_source import open_as_told
from precisionctl.commands.plan_te_export import TE, plan_te
from precisionctl.commands.writers import hf_writer
from precisionctl.conversion.work import Work, digest_of, open_output
from precisionctl.engines.base import Engine, engines
from precisionctl.errors import PrecisionError, RecipeError
from precisionctl.export import kv_cache
from precisionctl.export.export import Export, make_export, plan_of_values, served
from precisionctl.export.model_card import NAME, Card, beside
from precisionctl.export.reencode import check_model, coded_before, in_powers_of_2, seeded
from precisionctl.export.schemes import best_scheme
from precisionctl.fp8.carry import filled, read_state
from precisionctl.fp8.state import Fp8States
from precisionctl.planning.plan import Plan
from precisionctl.precision import PRESETS
from precisionctl.quant_methods.base import QuantMethod, Scheme, quant_methods


def plan_export(export: InferenceExport) -> Work:
    """Plan `export-inference`. Raises MissingFp8State where `static` needs what was never recorded."""
    reader = open_as_told(export.source, export.iteration, architecture=export.architecture, reference=export.reference)
    return plan_export_of(reader, coded_before(reader), export)


def plan_export_of(reader: Reader, coded: Coded | None, export: InferenceExport) -> Work:
    """Plan the export of an open source whose weights may have been codes before. Raises as `plan_export`."""
    if export.target == TE:
        return plan_te(reader, coded, export)
    engine = engine_named(export.target)
    plan = plan_of_values(reader)
    if coded:
        check_model(coded, plan)
    given = read_state(export.fp8_state, plan.gemms) if export.fp8_state else None
    recorded = filled(reader.fp8, given, None)
    scheme, method, made, notes = _made(reader, coded, plan, recorded, engine, export)
    if scheme != "static" and export.fp8_state and not export.kv_cache:
        raise RecipeError(f"{scheme} input scales are made by the engine, of no state", do="Leave --fp8-state out.")
    if export.kv_cache:
        kv_cache.check_engine(plan, engine, method)
        made = kv_cache.with_cache(made, method, kv_cache.recorded_scales(recorded, coded, plan))
        notes += kv_cache.notes(engine, method, recorded)
    else:
        notes += kv_cache.left_out(coded, plan)
    output = open_output(export.destination, export.source, export.reference, export.fp8_state)
    writer = hf_writer(
        output,
        made.plan,
        reader.companions,
        export=made,
        max_shard_size=export.max_shard_size,
        files={NAME: _card(made, engine, method, scheme, recorded, export).text(reader)},
        lacks=engine.lacks,
    )
    serve = engine.serve(export.destination, export.ranks, fp8_cache=export.kv_cache is not None)
    notes += [*left_behind(reader), *made.notes, *of_companions(reader), f"Serve it with: {serve}"]

    def finish(changed: Mapping[str, float]) -> None:
        notes.extend(of_way_back(coded, made.codes, changed) if coded else ())

    digest = digest_of(made.plan, export, export.fp8_state, coded)
    return Work(reader, made.plan, writer, output, finish, False, digest, notes, None, coded)


def _made(
    reader: Reader,
    coded: Coded | None,
    plan: Plan,
    recorded: Fp8States | None,
    engine: Engine,
    export: InferenceExport,
) -> tuple[Scheme, QuantMethod, Export, list[str]]:
    """The scheme, how it is spelled, the export's plan, and what to tell of all that."""
    precision = (export.recipe or PRESETS["fp8-delayed"]).of_layers(plan.model.num_layers)
    states = filled(recorded, seeded(reader, coded, plan), None)
    codes = coded if reader.encodings else None
    scheme, why = (export.scheme, "") if export.scheme else best_scheme(engine, plan, precision, states, codes)
    if scheme not in engine.spells:
        raise PrecisionError(f"no {scheme} for {engine.title}", do=f"Choose --scheme {' or '.join(engine.spells)}.")
    method = quant_methods()[engine.spells[scheme]]
    refusal = partial(engine.refusal, scheme=scheme, served=served(plan, export.ranks))
    made = make_export(
        plan,
        states,
        method,
        scheme,
        precision,
        refusal,
        keep_refused=export.keep_misfits,
        powers_of_2=scheme == "block" and codes is not None and in_powers_of_2(codes),
    )
    if found := engine.check_experts(made.codes, method.name, scheme):
        raise PrecisionError(
            f"{engine.title} does not load {found[0].what}",
            where=found[0].where,
            do="Export with --scheme static or block, or name the experts in keep_bf16 of a --recipe.",
        )
    notes = [f"Scheme {scheme}: {why}."] if why else []
    if scheme == "static":
        notes += of_input_scales(recorded, export.fp8_state)
    return scheme, method, made, notes


_SCHEMES: Mapping[Scheme, str] = {
    "static": "one scale for a weight, one for all its inputs",
    "dynamic": "one scale for an output channel of a weight, one for a token of inputs",
    "block": "one scale for 128 x 128 values of a weight, one for 128 of inputs",
    "mxfp8": "a power of two for 32 values of a weight or of inputs",
}


def _card(
    made: Export,
    engine: Engine,
    method: QuantMethod,
    scheme: Scheme,
    recorded: Fp8States | None,
    export: InferenceExport,
) -> Card:
    """What the model card says of an export."""
    file = Path(export.fp8_state.name) if export.fp8_state else None
    inputs = of_input_scales(recorded, file) if scheme == "static" else ("Input scales are made by the engine.",)
    facts = {
        "weights": "float8_e4m3fn",
        "format": method.name,
        "scheme": f"{scheme}: {_SCHEMES[scheme]}",
        "input scales": " ".join(inputs),
        "KV cache": "FP8, its scales stored" if export.kv_cache else "no scales stored",
    }
    name = export.destination.name
    command = engine.serve(beside(name), export.ranks, fp8_cache=export.kv_cache is not None)
    return Card(name, engine.title, engine.name, command, facts, made.codes, made.kept, export.base_model)


def engine_named(name: str) -> Engine:
    """Raises PrecisionError with the known names."""
    known = engines()
    if name not in known:
        raise PrecisionError(f"no engine `{name}`", do=f"Known: {', '.join(known)}.")
    return known[name]
