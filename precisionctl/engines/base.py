"""Engine: what one inference engine accepts of a Hugging Face directory of codes, as rules with their sources.

A new one is a file in this folder with an `ENGINE` in it. The rules need config.json, the tensors' shapes and
dtypes, and the values of the scales alone; no weight is read.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import precisionctl.engines
from precisionctl.discover import discover_names
from precisionctl.engines.rules.cache_rules import cache_scales_of_latents
from precisionctl.engines.rules.demands import other_codes, scales_of_no_use, wrong_scales
from precisionctl.engines.rules.fixed_settings import FixedSettings
from precisionctl.engines.rules.fused_rules import FusedLinears
from precisionctl.engines.rules.joined_tensors import wrongly_joined
from precisionctl.engines.rules.method_rules import MethodRules
from precisionctl.engines.rules.model_rules import CodesAlone, ExpertDtype, InEveryLayer
from precisionctl.engines.rules.required_keys import MissingKeys
from precisionctl.engines.rules.rule import Demand, EngineRule, Finding, QuantizedDirectory, broken
from precisionctl.engines.rules.serving_rules import Division, ShapeRules
from precisionctl.engines.serving import EXPERT, ServingLayout, served_config
from precisionctl.errors import CheckpointError, MappingError, PrecisionError, RecipeError, nearest, shown
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.base import FOUR_BITS, Quantization, QuantMethod, Scheme, codes_kind, form_in_words
from precisionctl.quant_methods.coded_weights import CodedWeight, coded_weights, ngram_table, recognise
from precisionctl.quant_methods.compressed_tensors import OLDER_KEY
from precisionctl.untrusted.safe_patterns import in_time

if TYPE_CHECKING:
    from torch import Tensor

_USABLE = EngineRule("codes are multiplied by scales: positive numbers that FP32 and FP16 can compute with", "IEEE 754")


@dataclass(frozen=True)
class ServeCommand:
    """How an engine is started: `command` serves the directory `{path}`; `on_ranks` is added for `{ranks}` GPUs,
    `on_experts` if these get experts whole, `on_cache` for an FP8 KV cache."""

    command: str
    on_ranks: str = ""
    on_experts: str = ""
    on_cache: str = ""

    def __call__(self, path: object, ranks: int, *, expert_parallel: bool = False, fp8_cache: bool = False) -> str:
        """The command that serves a directory."""
        options = (self.on_ranks if ranks > 1 else "") + (self.on_experts if expert_parallel else "")
        options += self.on_cache if fp8_cache else ""
        return (self.command + options).format(path=shlex.quote(str(path)), ranks=ranks)


@dataclass(frozen=True)
class NoClass:
    """That an engine has no class for a model, by a `rule`; of models whose config.json has a key `where`, if that is
    given."""

    rule: EngineRule
    where: str | None = None


@dataclass(frozen=True)
class Engine:
    """An inference engine, and its rules.

    name, title: as `--target` has it, and in words. serve: how it is started. spells: the quant method that exports to
    it are written in, by scheme. methods: what it does with the directories of each quant method that it loads; others
    break the rule `config_rule`, as does what its config says wrongly of a module.

    scales: the rule on shapes and dtypes of scales. shapes: which shapes of weights it takes as codes. fused: what it
    computes as one. division: how GPUs divide a model. latents: what it does with a scale of the KV cache of latent
    attention, which caches neither keys nor values. codes_alone: the models, by the `model_type` of the text model, of
    which it loads some linears as codes alone. mxfp4_experts: those whose experts may be MXFP4 beside blocks of FP8,
    and what of config.json says that they are (None: their tensors do). no_codes: those of which it computes no codes,
    whatever the format. no_class: those that it is known to have no class for, by `model_type`; of others that have a
    table nothing is known. fixed: settings of models that it passes over or refuses. wrappers: those, by `model_type`,
    of whose text model it makes the class that it has for that alone. in_every_layer: models, likewise, of which it
    asks for a tensor that transformers has in some layers.
    loads_own_classes: whether it looks for tensors only under the names that the model's own class saves.

    demands: all further rules on a directory of codes. keys: the keys that config.json must have, which an export adds.
    """

    name: str
    title: str
    serve: ServeCommand
    spells: Mapping[Scheme, str]
    methods: Mapping[str, MethodRules]
    config_rule: EngineRule
    scales: EngineRule
    shapes: ShapeRules
    fused: FusedLinears
    latents: EngineRule
    demands: Mapping[Demand, EngineRule]
    keys: Mapping[MissingKeys, EngineRule]
    division: Division = Division()
    codes_alone: Mapping[str, CodesAlone] = field(default_factory=dict)
    mxfp4_experts: Mapping[str, ExpertDtype | None] = field(default_factory=dict)
    no_codes: Mapping[str, EngineRule] = field(default_factory=dict)
    no_class: Mapping[str, NoClass] = field(default_factory=dict)
    fixed: Sequence[FixedSettings] = ()
    wrappers: Collection[str] = ()
    in_every_layer: Mapping[str, InEveryLayer] = field(default_factory=dict)
    loads_own_classes: bool = False

    def formats(self, method: str) -> Sequence[str]:
        """The schemes, and formats of packed codes, that the engine loads of a quant method."""
        return rules.formats if (rules := self.methods.get(method)) else ()

    @property
    def cache(self) -> dict[str, str]:
        """What the engine does with the scales of an FP8 KV cache, in words, by the quant methods beside which it does
        anything."""
        return {name: rules.cache for name, rules in self.methods.items() if rules.cache}

    def lacks(self, config: Mapping[str, Any]) -> list[str]:
        """The keys that the engine requires and this config.json lacks, in its `text_config` if it has one."""
        text = _of_text(config)
        return [key for missing in self.keys for key in missing(text)]

    def without_class(self, config: Mapping[str, Any]) -> list[Finding]:
        """That the engine is known to have no class for a model, as a finding. A directory with code of its own brings
        one."""
        kind = str(config.get("model_type"))
        known = self.no_class.get(kind)
        if known is None or config.get("auto_map") or (known.where and known.where not in config):
            return []
        return [Finding("config.json", f"a {kind}" + (f" with a {known.where}" if known.where else ""), known.rule)]

    def passed_over(self, config: Mapping[str, Any], stored: Collection[str] | None = None) -> list[Finding]:
        """The settings of a model that the engine is known to pass over, as findings; `stored` are the names of the
        directory's tensors, where there is one."""
        return self._fixed(config, stored, refused=False)

    def refused(self, config: Mapping[str, Any], stored: Collection[str] | None = None) -> list[Finding]:
        """What the engine is known to refuse in a model, likewise."""
        return self._fixed(config, stored, refused=True)

    def _fixed(self, config: Mapping[str, Any], stored: Collection[str] | None, *, refused: bool) -> list[Finding]:
        if str(config.get("model_type")) in self.wrappers:
            of_the_whole = {key: config[key] for key in _TIES if key in config}
            config = {**served_config(config), **of_the_whole}
        settings = (each for each in self.fixed if each.refused == refused)
        return [found for each in settings for found in each.check(config, stored)]

    def check(
        self,
        config: Mapping[str, Any],
        specs: Mapping[str, TensorSpec],
        read: Callable[[str], Tensor],
        served: ServingLayout | None = None,
        hf_quant_config: Mapping[str, Any] | None = None,
    ) -> list[Finding]:
        """Every rule that a directory breaks if the engine serves it as `served` says (None: on one GPU). `config` is
        config.json, `specs` are all stored tensors, scales included, `read` returns a scale's value by its name, and
        `hf_quant_config` is the content of hf_quant_config.json, if there is one."""
        try:
            with in_time():
                return self._findings(config, specs, read, served or ServingLayout.of(config), hf_quant_config)
        except (CheckpointError, MappingError, PrecisionError) as error:  # other ones are not the directory's
            return [Finding("config.json", error.what, self.config_rule)]

    def _findings(
        self,
        config: Mapping[str, Any],
        specs: Mapping[str, TensorSpec],
        read: Callable[[str], Tensor],
        served: ServingLayout,
        hf_quant_config: Mapping[str, Any] | None,
    ) -> list[Finding]:
        method = recognise(config)
        coded = {name: weight for name, weight in coded_weights(config, specs).items() if not ngram_table(name)}
        words = {weight.codes for weight in coded.values()}
        specs = {name: spec for name, spec in specs.items() if name not in words} | {
            name: weight.spec for name, weight in coded.items()
        }

        always = [*self.without_class(config), *self.refused(config, specs), *self.passed_over(config, specs)]
        text = _of_text(config)
        for missing, rule in self.keys.items():
            for key in missing(text):
                what = f"{key} is {shown(said)}" if isinstance(said := text.get(key), str | int) else f"no {key}"
                always.append(Finding("config.json", what, rule))
        always += self.division.check_spread(specs, served)
        if method is None or not (coded or method.name in self.methods):
            if (every := self.in_every_layer.get(str(config.get("model_type")))) and method is None:
                always += [Finding(name, "no such tensor", every.rule) for name in every.lacking(specs)]
            return always  # values, perhaps beside a KV cache in FP8 by a method that there are no rules for

        quantization = method.read(config["quantization_config"])
        scheme = quantization.narrowed({name: weight.scales for name, weight in coded.items()}, specs).scheme
        kinds = _kinds(method, quantization, scheme, coded)
        by_kind = _by_kind(kinds) or {scheme: []}
        rules, model_type = self.methods.get(method.name), config.get("model_type")
        of_model = rules.of_models.get(model_type, ()) if rules and isinstance(model_type, str) else ()
        known = (*self.formats(method.name), *of_model)
        if unread := next((kind for kind in by_kind if kind not in known), None):
            forms = (form_in_words(coded[n].form, coded[n].scales.input is not None) for n in by_kind[unread])
            what = next(forms, _in_words(unread))
            rule = self._loads(method.name, known) if rules else self.config_rule
            return [Finding("config.json", f"{method.name} with {what}", rule)]

        directory = QuantizedDirectory(
            config, method.name, scheme, method.spelling, specs, coded, kinds, read, served, hf_quant_config
        )
        return [*always, *self._of_codes(directory)]

    def _of_codes(self, directory: QuantizedDirectory) -> Iterator[Finding]:
        """The findings on a directory whose codes have formats that the engine loads."""
        method, scheme, specs = directory.method, directory.scheme, directory.specs
        rules = self.methods[method]
        ignored, values = rules.list_of(scheme), [name for name in specs if name not in directory.scales]
        text_type, mxfp4 = str(directory.text_type), self.mxfp4_experts.get(directory.model_type)
        alone = self.codes_alone.get(text_type)
        if rule := self.no_codes.get(directory.model_type):
            yield Finding("config.json", f"codes in a {directory.model_type}", rule)
        yield from broken(other_codes, self.config_rule, directory)
        yield from broken(wrong_scales, self.scales, directory)
        yield from broken(scales_of_no_use, _USABLE, directory)
        yield from self.shapes.check(directory)
        yield from self.division.check_groups(directory.served)
        yield from broken(ignored.misread, self.config_rule, directory)
        yield from self.check_joined(directory.config, method, directory.quantization, specs)
        yield from self.check_stored(specs, method, directory.text_type)
        yield from self.check_values(text_type, scheme, values)
        yield from broken(alone.other_scales, alone.rule, directory) if alone else ()
        yield from broken(mxfp4.contradicted, mxfp4.rule, directory) if mxfp4 else ()
        yield from broken(ignored.misread_experts, self.config_rule, directory)
        yield from self.fused.check(directory)
        own = rules.of_models.get(directory.model_type, ())
        for kind, names in ((kind, names) for kind, names in _by_kind(directory.kinds).items() if kind not in own):
            yield from self.check_weights(names, method, kind, directory.text_type)
        yield from broken(cache_scales_of_latents, self.latents, directory)
        for demand, rule in self.demands.items():
            yield from broken(demand, rule, directory)

    def check_weights(self, names: Iterable[str], method: str, scheme: str, text_type: object) -> list[Finding]:
        """The first of these weights that the engine does not load as codes because of its model, or because it is an
        expert's, as a finding."""
        known, rules = FOUR_BITS.get(scheme, scheme), self.methods[method]
        if (wide := rules.in_fp32) and text_type in wide.models and known not in wide.formats:
            what = f"{text_type} in {method} with {_in_words(known)}"
            return [Finding(name, what, wide.rule) for name in islice(names, 1)]
        values, formats = rules.as_values, rules.formats if rules.experts is None else rules.experts
        what = f"experts of {method} with {_in_words(known)}"
        rule = self._loads(f"experts of {method}", formats)
        if known in formats:
            if values is None or text_type not in values.models:
                return []
            what, rule = f"{what}, {values.why}", values.rule
        return [Finding(name, what, rule) for name in names if EXPERT.fullmatch(name)][:1]

    def _loads(self, what: str, formats: Sequence[str]) -> EngineRule:
        """That of this it loads these formats, and no others."""
        text = (
            f"of {what} it loads {', '.join(formats) or 'none'}; `convert --to hf` makes values of others, and "
            f"`export-inference --target {self.name}` codes that it loads"
        )
        return EngineRule(text, self.config_rule.source)

    def check_joined(
        self, config: Mapping[str, Any], method: str, quantization: Mapping[str, Any], specs: Mapping[str, TensorSpec]
    ) -> list[Finding]:
        """The weights among these tensors that the engine joins with others as it loads them, and does not find in the
        format by which it decodes them; of those whose names differ in numbers alone the first."""
        rule = self.methods[method].joined
        return [Finding(*found, rule) for found in wrongly_joined(config, quantization, specs)] if rule else []

    def check_stored(self, names: Iterable[str], method: str, text_type: object) -> list[Finding]:
        """The first of these tensors that has experts in a form in which the engine does not load them beside codes, as
        a finding: those of a layer as one tensor of values, or one by one."""
        rules = self.methods[method]
        in_one = rules.in_one.get(text_type) if isinstance(text_type, str) else None
        forms = {"as one tensor, in BF16": rules.one_by_one, "one by one": in_one}
        found = ((name, form) for name in names for form, which in forms.items() if which and which.fullmatch(name))
        return [Finding(name, f"experts of a layer {form}", self.config_rule) for name, form in islice(found, 1)]

    def check_values(self, text_type: str, scheme: str, values: Iterable[str]) -> list[Finding]:
        """That a model is in another scheme than the engine has kernels for, or one of these `values` should be codes,
        as a finding."""
        alone = self.codes_alone.get(text_type)
        if alone is None:
            return []
        if alone.blocks and scheme != "block":
            return [Finding("config.json", f"{text_type} with {_in_words(scheme)}", alone.rule)]
        left = filter(alone.concerns, values)
        return [Finding(name, "values, and no codes", alone.rule) for name in islice(left, 1)]

    def takes_mxfp4(self, config: Mapping[str, Any], names: Iterable[str]) -> bool:
        """Whether the engine loads MXFP4 beside blocks of FP8 in a model, if only these weights are that."""
        return str(config.get("model_type")) in self.mxfp4_experts and all(map(EXPERT.fullmatch, names))


_TIES = ("tie_word_embeddings", "tie_embedding")
"""What a wrapper says of the head of its text model, whose part of config.json it wins over in transformers."""


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of a config.json, with what MissingKeys have of a wrapper's."""
    of_the_whole = ("model_type", "quantization_config", OLDER_KEY)
    text = {**{key: config.get(key) for key in of_the_whole}, **served_config(config)}
    return text | {"model_type": str(text["model_type"])}  # which may be no word in a stranger's


def engines() -> dict[str, Engine]:
    """Every engine in this folder, and of plug-ins, by the name that `--target` takes."""
    return discover_names(precisionctl.engines, "ENGINE", Engine, lambda engine: [engine.name])


def engine_named(name: str, *others: str) -> Engine:
    """The engine of a name. Raises RecipeError for another, with what is perhaps meant: an engine, or one of the
    `others` that may stand in its place."""
    known = engines()
    if name not in known:
        said = _ALSO_CALLED.get(name.lower(), name)
        raise RecipeError(f"no engine `{name}`", do=nearest(said, (*known, *others)))
    return known[name]


_ALSO_CALLED = {
    "trtllm": "tensorrt-llm",
    "trt-llm": "tensorrt-llm",
    "gguf": "llama.cpp",
    "mlx-lm": "mlx",
    "mlx_lm": "mlx",
    "hf": "transformers",
}


def _kinds(method: QuantMethod, said: Quantization, scheme: str, coded: Mapping[str, CodedWeight]) -> dict[str, str]:
    """What the codes of each weight are: a scheme of FP8, or the name of packed ones. Where exports are written in the
    method, all have the `scheme` that the config says, and so have MXFP4 experts beside blocks (`mxfp4_experts`),
    unless the config has parts that differ, in their formats or in whether inputs have fixed scales."""
    formats_differ, inputs_differ = len({*said.by_target.values()}) > 1, said.by_target and said.static is None
    if said.blocks and method.spelling and not (formats_differ or inputs_differ):
        return dict.fromkeys(coded, scheme)
    return {name: codes_kind(each.form, each.scales.input is not None) for name, each in coded.items()}


def _by_kind(kinds: Mapping[str, str]) -> dict[str, list[str]]:
    """The weights of each kind."""
    found: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        found.setdefault(kind, []).append(name)
    return found


def _in_words(scheme: str) -> str:
    return f"{scheme} weights" if scheme in (*FOUR_BITS.values(), "INT8") else f"{scheme} activations"
