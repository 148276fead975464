"""Results whose weights are codes: for an inference engine, or the codes that they were before."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from precisionctl.architectures.families import table_of
from precisionctl.checkpoints.base import Reader
from precisionctl.codes.numerics import Numbers
from precisionctl.codes.statistics import Scaling
from precisionctl.commands.build import Result
from precisionctl.commands.misfits import Misfits
from precisionctl.commands.notes import (
    format_notes,
    four_bit_notes,
    in_bf16_notes,
    input_scale_notes,
    known_state_notes,
    rounded_notes,
    unreached_notes,
)
from precisionctl.commands.request import Codes, EngineExport, numerics
from precisionctl.commands.source import Source
from precisionctl.commands.source_notes import source_notes
from precisionctl.conversion.edges import edge_notes
from precisionctl.engines.base import Engine, engines
from precisionctl.engines.serving import ServingLayout, served_config
from precisionctl.errors import PrecisionError, RecipeError
from precisionctl.export import kv_cache
from precisionctl.export.as_before import AsBefore, all_mxfp4, in_powers_of_2
from precisionctl.export.encode import InScheme, WeightFormat, encode, fp8_jobs, in_scheme, is_slice, modules_in_bf16
from precisionctl.export.model_card import Card, path_in_command
from precisionctl.export.schemes import best_scheme, kept_in_four_bits
from precisionctl.model_shape import ModelShape
from precisionctl.planning.plan import Job, Plan
from precisionctl.planning.served_model import served
from precisionctl.quant_methods.base import FOUR_BITS, SCHEMES, Scheme, quant_methods
from precisionctl.quant_methods.coded_weights import scheme_of
from precisionctl.untabled_model import UntabledModel
from precisionctl.untrusted.safe_json import parse_json

_SCHEMES: Mapping[Scaling, Scheme] = {"delayed": "static", "current": "dynamic", "block": "block", "mxfp8": "mxfp8"}
"""The scheme in which an engine computes most like a recipe's scaling."""


def for_engine(kind: Codes, source: Source, engine: Engine, destination: Path) -> Result:
    """A result for an engine.

    Raises MissingFp8State where `static` needs amaxes that were never recorded, PrecisionError for what the engine does
    not take, RecipeError for state that a scheme has no use for.
    """
    reader, known, model = source.reader, source.known, source.plan.model
    export, precision = kind.export or EngineExport(engine.name), numerics(kind.recipe, model)
    jobs = fp8_jobs(source.plan, precision)
    scheme, why = _scheme(kind, source, engine, jobs)
    form = _format(export, source, engine, scheme, why)
    _check_blocks(engine, model.architecture, scheme, ())  # before amaxes are asked for, which nothing would need
    policy = _policy(export, source, engine, form, jobs)
    encoded = encode(source.plan, policy)
    _check_stored(engine, encoded, form)
    plan, cache_notes = _with_cache(export, source, engine, form, encoded)
    fixed = input_scale_notes(known.current, source.state_file, file_is_noted=True)
    notes = [
        *([f"Scheme {scheme}: {why}."] if why else ()),
        *(fixed if SCHEMES[scheme].fixed_inputs else ()),
        # of an export the choice of the scheme names outdated state; a conversion carries state along, used or not
        *(known.notes if kind.export else known_state_notes(known, carried=True)),
        *(unreached_notes(source.states, policy.jobs) if policy.inputs is not None else ()),
        *edge_notes(source.encodings, reader.specs, encoded),
        *four_bit_notes(scheme, source.encodings, encoded, source.hinted.path, destination),
        *cache_notes,
        *source_notes(source),
        *in_bf16_notes(reader, source.plan, precision, scheme, policy.refused),
        *rounded_notes(reader, plan),
        _how_to_serve(export, source, engine, destination),
    ]
    states = None if kind.export else known.current or known.outdated
    card = _card(kind, export, source, plan, engine, form, destination)
    return Result(plan, notes, states, encodings=source.encodings, card=card, lacks=engine.lacks)


def _policy(export: EngineExport, source: Source, engine: Engine, form: WeightFormat, jobs: Sequence[Job]) -> InScheme:
    """Which weights of these jobs become codes, and with which scales. Raises PrecisionError for what the engine does
    not take, and MissingFp8State for amaxes of inputs that were never recorded."""
    plan, model = source.plan, source.plan.model
    config, untabled = _config_of(source.reader, model), isinstance(model, UntabledModel)
    if rule := engine.no_codes.get(str(config.get("model_type"))):
        what = f"{engine.title} computes no codes of a {config['model_type']}: {rule.text}"
        raise PrecisionError(what, do="Or choose another --target.")
    misfits = Misfits(engine, plan, jobs, form, _layout(export, engine, plan), config)
    keep_misfits = export.keep_misfits or untabled
    if not keep_misfits:
        misfits.check_taken(jobs)  # first, as no advice on shapes would help
    method = form.method.name
    policy = in_scheme(
        plan,
        jobs,
        source.states,
        form,
        misfits.refusal,
        advice=misfits.advice,
        keep_refused=keep_misfits,
        why_no_state=source.known.why_none,
        kept=partial(engine.methods[method].ignored.kept, config, method, tied=untabled),
    )
    misfits.check_taken(policy.jobs)
    coded = {name for job in policy.jobs for name in job.writes}
    _check_blocks(engine, model.architecture, form.scheme, (name for name in plan.targets if name not in coded))
    return policy


def _layout(export: EngineExport, engine: Engine, plan: Plan) -> ServingLayout:
    """How the engine divides the model over its GPUs. Raises PrecisionError where it cannot, UnknownArchitecture where
    no table says how several would divide it."""
    if isinstance(plan.model, UntabledModel) and export.ranks > 1:
        raise plan.model.why
    layout = served(plan.model, plan.targets, export.ranks, expert_parallel=export.expert_parallel)
    if found := engine.division.check_spread(plan.targets, layout) or engine.division.check_groups(layout):
        raise PrecisionError(
            f"{engine.title} cannot divide it: {found[0].what}; {found[0].rule.text}",
            where=found[0].where,
            do="Choose another --tp" + (", or leave --expert-parallel out." if export.expert_parallel else "."),
        )
    return layout


def _check_stored(engine: Engine, plan: Plan, form: WeightFormat) -> None:
    """Raise PrecisionError if the engine does not load some tensor beside these codes."""
    if found := engine.check_stored(plan.targets, form.method.name, plan.model.architecture):
        raise PrecisionError(
            f"{engine.title} does not load {found[0].what}, beside codes of {form.method.name}",
            where=found[0].where,
            do="`export-inference --scheme block` has what it loads."
            if is_slice(found[0].where)
            else "Forget their codes first: `convert --to hf --precision bf16 --drop-encodings`.",
        )


def _with_cache(
    export: EngineExport, source: Source, engine: Engine, form: WeightFormat, plan: Plan
) -> tuple[Plan, list[str]]:
    """The plan with scales of an FP8 KV cache, if they are asked for, and the notes on caches. Raises as
    `kv_cache.check_engine` and `kv_cache.recorded_scales`."""
    if export.kv_cache:
        recorded = source.known.current
        kv_cache.check_engine(source.plan, engine, form.method)
        plan = kv_cache.with_cache(plan, form, kv_cache.recorded_scales(recorded, source.fixed_scales, source.plan))
        notes = [*kv_cache.notes(engine, form.method, recorded)]
    else:
        notes = [*kv_cache.left_out(source.encodings, source.plan)]
    return plan, [*notes, *kv_cache.of_no_cache(source.encodings, source.plan)]


def _scheme(kind: Codes, source: Source, engine: Engine, jobs: Sequence[Job]) -> tuple[Scheme, str]:
    """The scheme, and why it was chosen, if it was not asked for."""
    if kind.export is None:
        untrained = isinstance(source.plan.model, UntabledModel) and not source.states  # nor could a command record any
        return _SCHEMES[kind.recipe.scaling if kind.recipe else "current" if untrained else "delayed"], ""
    if kind.export.scheme:
        return kind.export.scheme, ""
    scheme, why = best_scheme(
        engine,
        source.plan.model,
        jobs,
        source.states,
        source.encodings,
        source.known.why_none,
        are_codes=bool(source.reader.encodings),
    )
    if source.encodings_now and (own := kept_in_four_bits(engine, source.encodings_now)):
        why += f". The weights are {FOUR_BITS[own]} codes, and four bits are written only if you ask: --scheme {own}"
    return scheme, why


def _check_blocks(engine: Engine, architecture: str, scheme: Scheme, values: Iterable[str]) -> None:
    """Raise PrecisionError if the engine takes some linears only as codes in blocks, and another scheme encodes them,
    or they are among the `values`."""
    if found := engine.check_blocks(architecture, scheme, values):
        raise PrecisionError(
            f"{engine.title} does not load it: {found[0].what}; {found[0].rule.text}",
            where=found[0].where,
            do="Choose `export-inference --scheme block`, with all linears of that name.",
        )


def _config_of(reader: Reader, model: ModelShape) -> Mapping[str, Any]:
    """The part of config.json that names the model's class, or code for it; for a wrapper all of it, as it also
    describes the towers."""
    if isinstance(model, UntabledModel):
        config: Mapping[str, Any] = model.config
        return config
    stored = parse_json(reader.companions.files.get("config.json", b"{}"), reader.path or "config.json")
    if model.wrapper:
        return stored
    own = {"auto_map": stored["auto_map"]} if stored.get("auto_map") else {}
    return own | {"model_type": model.architecture, "architectures": [table_of(model).model_types[model.architecture]]}


def _format(export: EngineExport, source: Source, engine: Engine, scheme: Scheme, why: str) -> WeightFormat:
    """The format of the weights: method, scheme, and what new scales are rounded to. `why` says why the scheme was
    chosen, if it was not asked for. Raises PrecisionError for a scheme that the engine does not read, and RecipeError
    for FP8 state that nothing would use."""
    if scheme not in engine.spells:
        raise PrecisionError(
            f"{engine.title} does not read {scheme}", do=f"Choose --scheme {' or '.join(engine.spells)}."
        )
    if not SCHEMES[scheme].fixed_inputs and source.state_file and not export.kv_cache:
        what = f"scheme {scheme} stores no input scales, so it takes no FP8 state"
        if why:
            raise RecipeError(f"{what}. It was chosen because {why}", do="Or leave --fp8-state out.")
        raise RecipeError(what, do="Leave --fp8-state out.")
    method = engine.spells[scheme]
    numbers: Numbers = "BF16" if engine.methods[method].bf16_scales else "FP32"
    now = source.encodings_now
    were_powers = now is not None and (in_powers_of_2(now) or all_mxfp4(now))  # values of MXFP4 stay exact
    if scheme == "block" and (were_powers or source.plan.model.architecture in engine.blocks_alone):
        numbers = "powers of 2"
    return WeightFormat(quant_methods()[method], scheme, numbers)


def _card(
    kind: Codes, export: EngineExport, source: Source, plan: Plan, engine: Engine, form: WeightFormat, destination: Path
) -> Card:
    """The model card of a result for an engine."""
    code, name = source.reader.companions.code, destination.name
    file = Path(source.state_file.name) if source.state_file else None
    scheme = SCHEMES[form.scheme]
    inputs = [_BY_ENGINE if scheme.coded_inputs else _IN_BF16]
    if scheme.fixed_inputs:
        inputs = list(input_scale_notes(source.known.current, file))
    facts = {
        "weights": plan.targets[plan.codes[0]].stored_dtype,
        "format": form.method.name,
        "scheme": f"{form.scheme}: {scheme.words}",
        "input scales": " ".join(inputs),
        "KV cache": "FP8, its scales stored" if export.kv_cache else "no scales stored",
    }
    if code:
        facts["code of its own"] = f"{', '.join(code)}: the engine needs to be told to trust it"
    has_class = not engine.without_class(_config_of(source.reader, source.plan.model))
    command = _served_as_asked(export, engine, path_in_command(name)) if has_class else ""
    kept = modules_in_bf16(source.plan, set(plan.codes))
    return Card(name, engine.title, engine.name, command, facts, plan.codes, kept, kind.base_model, scheme.codes)


def _how_to_serve(export: EngineExport, source: Source, engine: Engine, destination: Path) -> str:
    """The note on how a result is served, or that the engine has no class for it."""
    if found := engine.without_class(_config_of(source.reader, source.plan.model)):
        return f"{engine.title} does not serve it: it has no class for {found[0].what} ({found[0].rule.source})."
    return f"Serve it with: {_served_as_asked(export, engine, destination)}"


def _served_as_asked(export: EngineExport, engine: Engine, path: object) -> str:
    """The command that serves a result at a path as was asked for."""
    return engine.serve(
        path, export.ranks, expert_parallel=export.expert_parallel, fp8_cache=export.kv_cache is not None
    )


_BY_ENGINE = "Input scales are made by the engine."
_IN_BF16 = "Inputs are not quantized."


def as_before(source: Source, destination: Path) -> Result:
    """A result with the codes that the weights have, or once had. If the weights have changed since, raises
    MissingFp8State for their fixed input scales, and PrecisionError for scales of their KV cache."""
    reader, known, encodings = source.reader, source.known, source.encodings
    assert encodings is not None, "there were codes before"
    policy = AsBefore(encodings, known.current, fixed_hold=source.fixed_scales is not None)
    plan = encode(source.plan, policy)
    notes = [
        *format_notes(source.hinted.reference, encodings),
        *edge_notes(encodings, reader.specs, plan),
        *source_notes(source),
        *rounded_notes(reader, plan),
        *known_state_notes(known, carried=True),
    ]
    scheme = scheme_of(encodings.quantization, encodings.scales, encodings.weights)
    serving = [engine for engine in engines().values() if scheme in engine.formats(policy.method.name)]
    card = _card_as_before(destination.name, source.plan, policy, scheme, serving)

    def lacks(config: Mapping[str, Any]) -> Iterator[str]:
        """Keys that are not there: one engine's words for others might be none for the next."""
        said = served_config(config)
        return (key for engine in serving for key in engine.lacks(config) if said.get(key) is None)

    return Result(plan, notes, known.current or known.outdated, encodings=encodings, card=card, lacks=lacks)


def _card_as_before(name: str, plan: Plan, policy: AsBefore, scheme: str, serving: Sequence[Engine]) -> Card:
    """The model card of a result with its old codes, for the engines that read them."""
    encodings, method = policy.encodings, policy.method
    quantization = method.read(encodings.quantization)
    dtypes = sorted({spec.stored_dtype for spec in encodings.weights.values()})
    fixed = any(scales.input is not None for scales in encodings.scales.values())
    inputs = "as they were, or of what was recorded since"
    if not fixed:
        by_engine = any(form.inputs for form in quantization.formats)
        inputs = _BY_ENGINE if by_engine else _IN_BF16
    facts = {
        "weights": ", ".join(dtypes),
        "format": method.name,
        "scheme": scheme,
        "codes and scales": "the scales that the weights had before, and codes of their values; new scales where "
        "values have changed",
        "input scales": inputs,
    }
    matrices = [name for name, spec in plan.targets.items() if len(spec.shape) == 2 and name.endswith(".weight")]
    kept = [name.removesuffix(".weight") for name in matrices if name not in encodings.weights]
    title = " or ".join(engine.title for engine in serving) or f"readers of {method.name}"
    path = path_in_command(name)
    command = "\n".join(engine.serve(path, 1) for engine in serving) or f"precisionctl inspect {path}"
    codes = " and ".join(sorted({spec.codes_name for spec in encodings.weights.values()}))
    return Card(name, title, method.name, command, facts, list(encodings.weights), kept, codes=codes)
