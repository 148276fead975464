"""Results whose weights are codes for an inference engine, in a scheme that it reads."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from precisionctl.architectures.families import table_of, to_hf_config
from precisionctl.codes.numerics import ScaleRounding
from precisionctl.codes.statistics import Scaling, scaling_words
from precisionctl.commands.build import Result
from precisionctl.commands.misfits import Misfits
from precisionctl.commands.notes import (
    four_bit_notes,
    in_bf16_notes,
    input_scale_notes,
    known_state_notes,
    rounded_notes,
    uncoded_tower_notes,
    unreached_notes,
)
from precisionctl.commands.request import Request
from precisionctl.commands.run_precision import precision_of_export
from precisionctl.commands.source import Source
from precisionctl.commands.source_notes import kept_notes, source_notes
from precisionctl.conversion.recoding import recoding_notes
from precisionctl.engines.base import Engine
from precisionctl.engines.serving import ServingLayout
from precisionctl.errors import PrecisionError, RecipeError
from precisionctl.export import kv_cache
from precisionctl.export.as_before import all_mxfp4, in_powers_of_2
from precisionctl.export.encode import InScheme, WeightFormat, encode, fp8_jobs, in_scheme, modules_in_bf16
from precisionctl.export.model_card import INPUTS_BY_ENGINE, INPUTS_IN_BF16, Card, path_in_command
from precisionctl.export.schemes import best_scheme, kept_in_four_bits, takes
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.param import is_slice
from precisionctl.planning.gemm_selection import included_groups
from precisionctl.planning.plan import Job, Plan
from precisionctl.planning.served_model import served
from precisionctl.precision import EVERY_GEMM, Precision
from precisionctl.quant_methods.base import FOUR_BITS, SCHEMES, Scheme, quant_methods
from precisionctl.untrusted.safe_json import parse_json

_SCHEMES: Mapping[Scaling, Scheme] = {
    "delayed": "static",
    "current": "dynamic",
    "block": "block",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
"""The scheme in which an engine computes most like a recipe's scaling."""
_NO_SCHEME: tuple[Scaling, ...] = ("delayed", "current")
"""Scalings whose numbers no scheme has without state: weights have one scale each, and those of `dynamic` one per
channel."""


def for_engine(source: Source, engine: Engine) -> Result:
    """A result for an engine.

    Raises MissingFp8State where `static` needs amaxes that were never recorded, PrecisionError for what the engine does
    not take, RecipeError for state that a scheme has no use for.
    """
    return _EngineCodes(source, engine).result()


@dataclass(frozen=True)
class _EngineCodes:
    """How a source becomes codes that an engine serves, as was asked for."""

    source: Source
    engine: Engine

    @property
    def request(self) -> Request:
        return self.source.request

    def result(self) -> Result:
        request, source, engine, known = self.request, self.source, self.engine, self.source.known
        precision, not_heeded = precision_of_export(request.recipe, source.trained_in, source.plan.model)
        jobs = fp8_jobs(source.plan, precision, included_groups(source.plan, request.include))
        if not jobs and fp8_jobs(source.plan, EVERY_GEMM):
            raise PrecisionError(
                f"{'the recipe' if request.recipe else 'the run'} keeps all in BF16 that could be codes",
                do="Give a --recipe that keeps less, or --include PATTERN, whatever is kept.",
            )
        scheme, why = self._scheme(jobs)
        form = self._format(scheme, why)
        self._check_values(scheme, ())  # before amaxes are asked for, which nothing would need
        policy = self._policy(form, jobs)
        encoded = encode(source.plan, policy)
        self._check_stored(encoded, form)
        if request.kv_cache:
            kv_cache.check_engine(source.plan, engine, form.method)
            scales = kv_cache.recorded_scales(known.current, source.cache_scales, source.plan)
            plan = kv_cache.with_cache(encoded, form, scales)
            cache_notes = [*kv_cache.notes(engine, form.method, known.current)]
        else:
            plan = encoded
            cache_notes = [*kv_cache.left_out(source.encodings, source.plan)]

        unserved = self._unserved(plan)
        fixed = input_scale_notes(known.current, request.fp8_state, file_is_noted=True)
        read = (source.reader.path if request.iteration is not None else None) or request.source
        notes = [
            *([f"Scheme {scheme}: {why}."] if why else ()),
            *(fixed if SCHEMES[scheme].fixed_inputs else ()),
            # of an export the choice of the scheme names outdated state; a conversion carries state along, used or not
            *(known.notes if request.target else known_state_notes(known, carried=True)),
            *(unreached_notes(source.states, policy.jobs) if policy.inputs is not None else ()),
            *recoding_notes(source.encodings, source.reader.specs, encoded),
            *four_bit_notes(scheme, source.encodings, encoded, read, request.destination),
            *cache_notes,
            *kv_cache.of_no_cache(source.encodings, source.plan),
            *source_notes(source),
            *in_bf16_notes(source.reader, source.plan, precision, scheme, policy.refused),
            *kept_notes(source, jobs, options="--include PATTERN, or a --recipe"),
            *not_heeded,
            *uncoded_tower_notes(plan),
            *rounded_notes(source.reader, plan),
            *(
                f"{engine.title} computes otherwise: {each.what}; {each.rule.text}."
                for each in engine.passed_over(self._whole_config, plan.targets)
            ),
            *(unserved or [f"Serve it with: {self._serve(request.destination)}"]),
        ]
        states = None if request.target else known.current or known.outdated
        card = self._card(plan, form)
        return Result(
            plan,
            notes,
            states,
            encodings=source.encodings,
            card=card,
            lacks=engine.lacks,
            trained_in=source.run_precision,
        )

    def _scheme(self, jobs: Sequence[Job]) -> tuple[Scheme, str]:
        """The scheme, and why it was chosen, if it was not asked for."""
        recipe, source, engine = self.request.recipe, self.source, self.engine
        if self.request.target is None:
            # nor could a command record any state
            untrained = isinstance(source.plan.model, UntabledModel) and not source.states
            return _SCHEMES[recipe.scaling if recipe else "current" if untrained else "delayed"], ""
        if scheme := self.request.scheme_of_codes:
            return scheme, ""
        of_run = [each for each in self._schemes_of_run if self._takes(each, jobs)]
        trained, said = self._trained
        scheme, why = best_scheme(
            engine,
            source.plan.model,
            jobs,
            source.states,
            source.encodings,
            source.known.why_none,
            of_run=of_run,
            said=said,
            asked=trained is recipe is not None and not self.request.fp8_state,
            recordable=lambda fixed: self._misfits(jobs, self._format(fixed, "")).left() if source.states else jobs,
            are_codes=bool(source.reader.encodings),
        )
        if trained and not trained.keeps_state and scheme not in of_run:
            why += f". {said[0].upper()}{said[1:]}"
            if not self._schemes_of_run:
                why += ", whose numbers no scheme has"
            elif not of_run:
                why += f", which {engine.title} does not take of this model"
            elif SCHEMES[of_run[0]].fixed_inputs:
                why += f": with what `precisionctl calibrate` records, as --fp8-state, --scheme {of_run[0]}"
            else:
                why += f": --scheme {of_run[0]}"
        if source.encodings_now and (own := kept_in_four_bits(engine, source.encodings_now)):
            codes = FOUR_BITS[own]
            why += f". The weights are {codes} codes, and four bits are written only if you ask: --scheme {own}"
        return scheme, why

    @cached_property
    def _trained(self) -> tuple[Precision | None, str]:
        """The precision of the run that wrote the source, or of a recipe that is given and of which there are schemes,
        and who says it, in words."""
        recipe, run = self.request.recipe, self.source.trained_in
        if recipe and recipe.scaling not in _NO_SCHEME:
            return recipe, f"the recipe says {scaling_words(recipe.scaling)}"
        return run, f"the run was in {scaling_words(run.scaling)}" if run else ""

    @property
    def _schemes_of_run(self) -> tuple[Scheme, ...]:
        """The schemes whose weights are like the numbers of that precision, the better one first."""
        trained, _ = self._trained
        if trained is None or trained.scaling in _NO_SCHEME:
            return ()
        scheme = _SCHEMES[trained.scaling]
        return (scheme, "nvfp4a16") if SCHEMES[scheme].fixed_inputs else (scheme,)

    def _takes(self, scheme: Scheme, jobs: Sequence[Job]) -> bool:
        """Whether the engine takes the weights of all these jobs in a scheme."""
        engine, model = self.engine, self.source.plan.model
        if scheme not in engine.spells or not takes(engine, model, jobs, scheme):
            return False
        return self._misfits(jobs, self._spelled(scheme)).all_fit()

    def _format(self, scheme: Scheme, why: str) -> WeightFormat:
        """The format of the weights: method, scheme, and what new scales are rounded to. `why` says why the scheme was
        chosen, if it was not asked for. Raises PrecisionError for a scheme that the engine does not read, and
        RecipeError for FP8 state that nothing would use."""
        engine = self.engine
        if scheme not in engine.spells:
            raise PrecisionError(
                f"{engine.title} does not read {scheme}", do=f"Choose --scheme {' or '.join(engine.spells)}."
            )
        if not SCHEMES[scheme].fixed_inputs and self.request.fp8_state and not self.request.kv_cache:
            what = f"scheme {scheme} stores no input scales, so it takes no FP8 state"
            if why:
                raise RecipeError(f"{what}. It was chosen because {why}", do="Or leave --fp8-state out.")
            raise RecipeError(what, do="Leave --fp8-state out.")
        return self._spelled(scheme)

    def _spelled(self, scheme: Scheme) -> WeightFormat:
        """The format of weights in a scheme that the engine reads."""
        source, engine = self.source, self.engine
        method = engine.spells[scheme]
        rounding: ScaleRounding = "BF16" if engine.methods[method].bf16_scales else "FP32"
        were = source.encodings  # of values too: those that have not changed get their codes again
        were_powers = were is not None and (in_powers_of_2(were) or all_mxfp4(were))  # values of MXFP4 stay exact
        trained, _ = self._trained
        as_trained = trained is not None and trained.scaling == "block" and not trained.f32_block_scales
        alone = engine.codes_alone.get(source.plan.model.architecture)
        if scheme == "block" and (were_powers or as_trained or (alone and alone.blocks)):
            rounding = "powers of 2"
        return WeightFormat(quant_methods()[method], scheme, rounding)

    def _policy(self, form: WeightFormat, jobs: Sequence[Job]) -> InScheme:
        """Which weights of these jobs become codes, and with which scales. Raises PrecisionError for what the engine
        does not take, and MissingFp8State for amaxes of inputs that were never recorded."""
        source, engine, plan = self.source, self.engine, self.source.plan
        config, untabled = self._config, isinstance(plan.model, UntabledModel)
        if rule := engine.no_codes.get(str(config.get("model_type"))):
            what = f"{engine.title} computes no codes of a {config['model_type']}: {rule.text}"
            raise PrecisionError(what, do="Or choose another --target.")
        misfits = self._misfits(jobs, form)
        keep_misfits = self.request.keep_misfits or untabled
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
        self._check_values(form.scheme, (name for name in plan.targets if name not in coded))
        return policy

    def _misfits(self, jobs: Sequence[Job], form: WeightFormat) -> Misfits:
        return Misfits(self.engine, self.source.plan, jobs, form, self._layout, self._config)

    @cached_property
    def _layout(self) -> ServingLayout:
        """How the engine divides the model over its GPUs. Raises PrecisionError where it cannot, UnknownArchitecture
        where no table says how several would divide it."""
        request, engine, plan = self.request, self.engine, self.source.plan
        if isinstance(plan.model, UntabledModel) and request.ranks > 1:
            raise plan.model.why
        layout = served(plan.model, plan.targets, request.ranks, expert_parallel=request.expert_parallel)
        if found := engine.division.check(plan.targets, layout):
            do = self._other_division(layout)
            raise PrecisionError(
                f"{engine.title} cannot divide it: {found[0].what}; {found[0].rule.text}",
                where=found[0].where,
                do=do,
            )
        return layout

    def _other_division(self, layout: ServingLayout) -> str:
        """The advice for a layout that the engine cannot make: one that it can, as near to it as there is."""
        joined = replace(layout, expert_parallel=False)
        others = [*(each for each in layout.on_fewer() if each.expert_parallel), joined, *joined.on_fewer()]
        taken = next(each for each in others if not self.engine.division.check(self.source.plan.targets, each))
        number = f"another --tp, such as {taken.ranks}" if taken.ranks < layout.ranks else ""
        if taken.expert_parallel == layout.expert_parallel:
            return f"Choose {number}."
        return "Leave --expert-parallel out" + (f", and choose {number}." if number else ".")

    def _check_values(self, scheme: Scheme, values: Iterable[str]) -> None:
        """Raise PrecisionError if the engine takes some linears only as codes, perhaps in blocks, and another scheme
        encodes them, or they are among the `values`."""
        architecture = self.source.plan.model.architecture
        if found := self.engine.check_values(architecture, scheme, values):
            raise PrecisionError(
                f"{self.engine.title} does not load it: {found[0].what}; {found[0].rule.text}",
                where=found[0].where,
                do="Choose `export-inference --scheme block`, with all linears of that name; --include takes those "
                "that stay in BF16."
                if self.engine.codes_alone[architecture].blocks
                else "Name no linear of that name in --exclude; --include takes those that a run kept in BF16. Or "
                "choose a --scheme that takes its shape, or another --target.",
            )

    def _check_stored(self, plan: Plan, form: WeightFormat) -> None:
        """Raise PrecisionError if the engine does not load some tensor beside these codes."""
        if found := self.engine.check_stored(plan.targets, form.method.name, plan.model.architecture):
            raise PrecisionError(
                f"{self.engine.title} does not load {found[0].what}, beside codes of {form.method.name}",
                where=found[0].where,
                do="`export-inference --scheme block` has what it loads."
                if is_slice(found[0].where)
                else "Forget their codes first: `convert --to hf --precision bf16 --drop-encodings`.",
            )

    @cached_property
    def _stored_config(self) -> Mapping[str, Any]:
        """The config.json that the result's is made from; empty where there is none."""
        reader = self.source.reader
        config: Mapping[str, Any] = parse_json(
            reader.companions.files.get("config.json", b"{}"), reader.path or "config.json"
        )
        return config

    def _unserved(self, plan: Plan) -> list[str]:
        """Why the engine does not load the result, in notes; none where it is not known to."""
        engine = self.engine
        if found := engine.without_class(self._config):
            return [f"{engine.title} does not serve it: it has no class for {found[0].what} ({found[0].rule.source})."]
        refused = engine.refused(self._whole_config, plan.targets)
        return [f"{engine.title} does not load it: {each.what}; {each.rule.text}." for each in refused]

    @cached_property
    def _whole_config(self) -> Mapping[str, Any]:
        """The result's config.json; empty where nothing says it."""
        config, model = self._stored_config, self.source.plan.model
        return config if config or isinstance(model, UntabledModel) else to_hf_config(model, "bfloat16")

    @cached_property
    def _config(self) -> Mapping[str, Any]:
        """The part of config.json that names the model's class, or code for it; for a wrapper all of it, as it also
        describes the towers."""
        model = self.source.plan.model
        if isinstance(model, UntabledModel):
            config: Mapping[str, Any] = model.config
            return config
        if model.wrapper:
            return self._stored_config
        code = self._stored_config.get("auto_map")
        architecture, own = model.architecture, {"auto_map": code} if code else {}
        return own | {"model_type": architecture, "architectures": [table_of(model).model_types[architecture]]}

    def _card(self, plan: Plan, form: WeightFormat) -> Card:
        request, source, engine = self.request, self.source, self.engine
        code, scheme = source.reader.companions.code, SCHEMES[form.scheme]
        inputs = [INPUTS_BY_ENGINE if scheme.coded_inputs else INPUTS_IN_BF16]
        if scheme.fixed_inputs:
            file = Path(request.fp8_state.name) if request.fp8_state else None
            inputs = list(input_scale_notes(source.known.current, file))
        facts = {
            "weights": plan.targets[plan.codes[0]].stored_dtype,
            "format": form.method.name,
            "scheme": f"{form.scheme}: {scheme.words}",
            "input scales": " ".join(inputs),
            "KV cache": "FP8, its scales stored" if request.kv_cache else "no scales stored",
        }
        if code:
            facts["code of its own"] = f"{', '.join(code)}: the engine needs to be told to trust it"
        name = request.destination.name
        command = "" if self._unserved(plan) else self._serve(path_in_command(name))
        kept = modules_in_bf16(source.plan, set(plan.codes))
        return Card(
            name,
            title=engine.title,
            tag=engine.name,
            command=command,
            facts=facts,
            quantized=plan.codes,
            kept=kept,
            base_model=request.base_model,
            codes=scheme.codes,
        )

    def _serve(self, path: object) -> str:
        """The command that serves the result at a path."""
        request, fp8_cache = self.request, self.request.kv_cache is not None
        return self.engine.serve(path, request.ranks, expert_parallel=request.expert_parallel, fp8_cache=fp8_cache)
