"""Engine: what one inference engine accepts of a Hugging Face directory of codes, as rules with their sources.

A new one is a file in this folder with an `ENGINE` in it. The rules need config.json, the tensors' shapes and
dtypes, and the values of the scales alone; no weight is read.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import precisionctl.engines
from precisionctl.discover import discover_names
from precisionctl.engines.cache_rules import cache_scales_of_latents
from precisionctl.engines.code_rules import (
    EXPERT,
    experts_module,
    linears,
    other_codes,
    partly_quantized,
    unequal_experts,
    unequal_in_group,
    wrong_scales,
    wrongly_ignored,
)
from precisionctl.engines.demands import scales_of_no_use
from precisionctl.engines.ignore_lists import IgnoreList, in_time
from precisionctl.engines.joined_tensors import wrongly_joined
from precisionctl.engines.model_rules import BlocksAlone, ExpertDtype, ExpertsAsValues, RowsMoved, Unquantized
from precisionctl.engines.names_in_memory import possible, renamed
from precisionctl.engines.required_keys import MissingKeys
from precisionctl.engines.rule import Demand, EngineRule, Finding, QuantizedDirectory, broken
from precisionctl.engines.serving import FUSED, HEADS_EVENLY, Ragged, ServingLayout, text_config
from precisionctl.errors import PrecisionctlError, RecipeError, nearest, shown
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.base import (
    CHANNEL,
    FOUR_BITS,
    TENSOR,
    Block,
    Quantization,
    QuantMethod,
    Scales,
    Scheme,
    form_in_words,
    kind_of,
)
from precisionctl.quant_methods.coded_weights import CodedWeight, coded_weights, recognise
from precisionctl.quant_methods.compressed_tensors import OLDER_KEY

if TYPE_CHECKING:
    from torch import Tensor

_USABLE = EngineRule("codes are multiplied by scales: positive numbers that FP32 and FP16 can compute with", "IEEE 754")

_CONV1D = re.compile(r"transformer\.h\.\d+\.(attn|mlp)\.(c_attn|c_proj|c_fc)\.weight")
"""GPT-2's linears, stored as `[in, out]`."""

_OF_CONV1D = ("gpt2", "openai-gpt")
"""Whose classes have them. Linears of GPT-BigCode and GPT-Neo have the same names, and are `[out, in]`."""


@dataclass(frozen=True)
class Engine:
    """An inference engine, and its rules.

    What it loads: `spells` is the quant method that exports to it are written in, by scheme; `reads` are the schemes,
    or four-bit formats, that it loads of each quant method, `reads_experts` those that it loads for experts too.
    `bf16_scales` are the quant methods whose FP32 scales it rounds to BF16. `joins` says, by quant method, in which
    format it loads tensors that it joins with others as it loads them. `decodes` are the methods whose codes become
    values before it multiplies, and what it asks of FP8 if it is told to multiply codes. `global_scales` says what it
    makes of those of NVFP4 that differ among linears that it fuses.

    What it finds: with `renames` modules have other names in memory, by transformers' own table; `loads_own_classes`
    says whether it looks for tensors only under the names that the model's own class saves. `one_by_one` are
    experts that it does not load as values beside codes of a quant method, if they are stored as one tensor, `in_one`
    those that it loads so alone, by the `model_type` of text models. `unquantized` are, by quant method, modules that
    are values whatever the list says; `experts_in_list` how the names end, behind that of the module of a layer's
    experts, by which it looks in the list of such a method for those that are one tensor; in that of `experts_as_one`
    it looks for that module where they are stored one by one, too.
    `blocks_alone` are the models, by `model_type`, of which it loads no codes but blocks of `quant_method: fp8`, and
    the linears that must be such codes; `expert_dtype` those whose experts may be MXFP4 beside such blocks, and by what
    it knows (None: by their tensors). `experts_as_values` are those whose experts it does not load as codes of a
    quant method that it loads for others. `moves` are those, by `model_type`, of which it moves rows as it loads them.

    How it computes: `fuses` are the linears of one input that it computes as one, `ragged` which linears may have a
    last block of scales that is cut off, `reads_conv1d` whether it loads codes for GPT-2's linears. `ignores` says how
    it reads the list of modules that are not FP8: by quant method, or by method and scheme where one scheme differs.

    Further rules: `demands`, and `keys`, which config.json must have and an export adds. `cache` says in words what it
    does with the scales of an FP8 KV cache, by quant method (none: nothing), and `latents` what it does with those of
    latent attention, which caches neither keys nor values.

    How it is started: `command` serves the directory `{path}`; `on_ranks` is added for `{ranks}` GPUs, `on_experts` if
    these get experts whole, `on_cache` for an FP8 cache. `spreads` is what it then asks of a model's experts, and
    `evenly` whether each GPU must get as many. `whole_groups` says that GPUs share no group of a mixer in a directory
    of codes."""

    name: str
    title: str
    spells: Mapping[Scheme, str]
    reads: Mapping[str, tuple[str, ...]]
    reads_experts: Mapping[str, tuple[str, ...]]
    command: str
    on_ranks: str
    on_experts: str
    quantisation: EngineRule
    scales: EngineRule
    aligned: EngineRule
    blocks: EngineRule
    ragged: Ragged
    fused: EngineRule
    global_scales: EngineRule
    all_or_none: EngineRule
    fuses: Sequence[tuple[str, ...]]
    reads_conv1d: bool
    experts: EngineRule
    ignores: Mapping[str | tuple[str, str], IgnoreList]
    demands: Mapping[Demand, EngineRule]
    keys: Mapping[MissingKeys, EngineRule]
    cache: Mapping[str, str]
    latents: EngineRule
    on_cache: str
    spreads: EngineRule | None = None
    evenly: bool = False
    whole_groups: EngineRule | None = None
    bf16_scales: frozenset[str] = frozenset()
    joins: Mapping[str, EngineRule] = field(default_factory=dict)
    decodes: Mapping[str, EngineRule] = field(default_factory=dict)
    renames: bool = False
    loads_own_classes: bool = False
    one_by_one: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    in_one: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    unquantized: Mapping[str, Unquantized] = field(default_factory=dict)
    experts_in_list: Mapping[str, Sequence[str]] = field(default_factory=dict)
    experts_as_one: frozenset[str] = frozenset()
    blocks_alone: Mapping[str, BlocksAlone] = field(default_factory=dict)
    expert_dtype: Mapping[str, ExpertDtype | None] = field(default_factory=dict)
    experts_as_values: Mapping[str, ExpertsAsValues] = field(default_factory=dict)
    moves: Mapping[object, RowsMoved] = field(default_factory=dict)

    def serve(self, path: object, ranks: int, *, expert_parallel: bool = False, fp8_cache: bool = False) -> str:
        """The command that serves a directory."""
        options = (self.on_ranks if ranks > 1 else "") + (self.on_experts if expert_parallel else "")
        options += self.on_cache if fp8_cache else ""
        return (self.command + options).format(path=shlex.quote(str(path)), ranks=ranks)

    def lacks(self, config: Mapping[str, Any]) -> list[str]:
        """The keys that the engine requires and this config.json lacks, in its `text_config` if it has one."""
        text = _of_text(config)
        return [key for missing in self.keys for key in missing(text)]

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
        except PrecisionctlError as error:
            return [Finding("config.json", error.what, self.quantisation)]

    def _findings(
        self,
        config: Mapping[str, Any],
        specs: Mapping[str, TensorSpec],
        read: Callable[[str], Tensor],
        served: ServingLayout,
        hf_quant_config: Mapping[str, Any] | None,
    ) -> list[Finding]:
        method, coded = recognise(config), coded_weights(config, specs)
        scales = {name: weight.scales for name, weight in coded.items()}
        words = {weight.codes for weight in coded.values()}
        specs = {name: spec for name, spec in specs.items() if name not in words} | {
            name: weight.spec for name, weight in coded.items()
        }
        always = [*self._missing_keys(config), *self.check_spread(specs, served)]
        if method is None:
            return always  # plain BF16 or FP16: every engine loads it
        model_type, quantization = str(config.get("model_type")), config["quantization_config"]
        said = method.read(quantization)
        scheme = said.narrowed(scales, specs).scheme
        codes = {name: specs[name] for name in scales}
        kinds = _kinds(method, said, scheme, coded)
        by_kind: dict[str, list[str]] = {} if coded else {scheme: []}
        for name, kind in kinds.items():
            by_kind.setdefault(kind, []).append(name)
        if unread := [kind for kind in by_kind if kind not in self.reads.get(method.name, ())]:
            forms = (coded[name] for name in by_kind[unread[0]])
            what = next(
                (form_in_words(each.form, each.scales.input is not None) for each in forms), _in_words(unread[0])
            )
            rule = self._loads(method.name, self.reads[method.name]) if method.name in self.reads else self.quantisation
            return [Finding("config.json", f"{method.name} with {what}", rule)]
        found = QuantizedDirectory(
            model_type, quantization, method.name, scheme, method.spelling, specs, scales, kinds, read, hf_quant_config
        )
        floating = {name: each for name, each in scales.items() if not specs[name].element.is_integer}
        divided = {} if served.uneven else codes
        shapes = (
            self.check_shape(name, spec, coded[name].form.block, served, method.name) for name, spec in divided.items()
        )
        alone, experts = self.blocks_alone.get(model_type), self.expert_dtype.get(model_type)
        text_type = text_config(config).get("model_type")
        return [
            *always,
            *other_codes(scales, specs, self.quantisation),
            *wrong_scales(found, self.scales),
            *broken(scales_of_no_use, _USABLE, found),
            *(finding for finding in shapes if finding),
            *(moved for name in codes if (moved := self.check_moved(name, specs[name], scales[name], served))),
            *served.unknown(codes),
            *self.check_groups(served),
            *wrongly_ignored(
                found,
                self._list_of(found),
                self._names(config, found),
                self.quantisation,
                self._is_unquantized(config, method.name),
            ),
            *self.check_joined(config, method, quantization, specs),
            *self.check_stacked(specs, method.name, text_type),
            *self.check_blocks(model_type, scheme, (name for name in specs if name not in scales)),
            *(alone.other_scales(scales, read) if alone else ()),
            *(experts.contradicted(config, codes) if experts else ()),
            *self._unlisted_experts(found),
            *partly_quantized(found, self.all_or_none, self.fuses),
            *unequal_in_group(floating, read, self.fused, self.global_scales, self.fuses or FUSED),
            *unequal_experts(scales, read, self.experts),
            *(
                finding
                for kind, names in by_kind.items()
                for finding in self.check_experts(names, method.name, kind, text_type)
            ),
            *broken(cache_scales_of_latents, self.latents, found),
            *(finding for demand, rule in self.demands.items() for finding in broken(demand, rule, found)),
        ]

    def _missing_keys(self, config: Mapping[str, Any]) -> list[Finding]:
        """What the engine requires of config.json and does not find there, or finds in words that it does not know."""
        text = _of_text(config)
        return [
            Finding(
                "config.json",
                f"{key} is {shown(found)}" if isinstance(found := text.get(key), str) else f"no {key}",
                rule,
            )
            for missing, rule in self.keys.items()
            for key in missing(text)
        ]

    def check_shape(
        self, name: str, spec: TensorSpec, block: Block, served: ServingLayout, method: str
    ) -> Finding | None:
        """The rule that a weight of this shape breaks as codes of a method with a scale for each block; None where it
        breaks none."""
        rule = self.aligned if block in (TENSOR, CHANNEL) else self.blocks
        what = self.refusal(name, spec, block, served, method)
        if what is None and method in self.decodes and block in (TENSOR, CHANNEL) and spec.packing is None:
            what, rule = served.refusal(name, spec, block, self.ragged), self.decodes[method]
        return Finding(name, what, self.quantisation if self._unread(name, served) else rule) if what else None

    def refusal(self, name: str, spec: TensorSpec, block: Block, served: ServingLayout, method: str) -> str | None:
        """Why the engine refuses a weight of this shape as codes of a method with a scale for each block, in words;
        None if it takes it."""
        if self._unread(name, served):
            return "codes of a class that is no linear are taken for weights"
        if method in self.decodes and block[0] not in (None, 1):
            return None  # it pads a weight that ends within a block
        return served.refusal(name, spec, block, self.ragged, aligned=method not in self.decodes)

    def check_moved(self, name: str, spec: TensorSpec, scales: Scales, served: ServingLayout) -> Finding | None:
        """That the engine cannot move the rows of a weight together with their scales as it loads it, as a finding;
        None where it can, or does not move them."""
        moved = self.moves.get(served.model_type)
        return moved.check(name, spec, scales, served) if moved else None

    def _is_unquantized(self, config: Mapping[str, Any], method: str) -> Callable[[str], bool | None]:
        """Whether a module, by its name in memory, is never quantized; None where its method and its list say it."""
        never, model_type = self.unquantized.get(method), text_config(config).get("model_type")
        return lambda module: never.concerns(module, model_type) if never else None

    def _unread(self, name: str, served: ServingLayout) -> bool:
        return not self.reads_conv1d and served.model_type in _OF_CONV1D and bool(_CONV1D.fullmatch(name))

    def check_experts(self, names: Iterable[str], method: str, scheme: str, model_type: object) -> list[Finding]:
        """The first of these weights that the engine does not load as codes because it is an expert's, as a finding."""
        known = FOUR_BITS.get(scheme, scheme)
        read = known in self.reads_experts.get(method, ())
        values = self.experts_as_values.get(method)
        what = f"experts of {method} with {_in_words(known)}"
        rule = self._loads(f"experts of {method}", self.reads_experts.get(method, ()))
        if read:
            if values is None or model_type not in values.models:
                return []
            what, rule = f"{what}, which ask this model's config for {values.asked}", values.rule
        return [Finding(name, what, rule) for name in names if EXPERT.fullmatch(name)][:1]

    def _loads(self, what: str, reads: Sequence[str]) -> EngineRule:
        """That of this it loads the schemes that it `reads`, and no others."""
        text = (
            f"of {what} it loads {', '.join(reads) or 'none'}; `convert --to hf` makes values of others, and "
            f"`export-inference --target {self.name}` codes that it loads"
        )
        return EngineRule(text, self.quantisation.source)

    def check_joined(
        self,
        config: Mapping[str, Any],
        method: QuantMethod,
        quantization: Mapping[str, Any],
        specs: Mapping[str, TensorSpec],
    ) -> list[Finding]:
        """The weights among these tensors that the engine joins with others as it loads them, and does not find in the
        format by which it decodes them; of those whose names differ in numbers alone the first."""
        rule = self.joins.get(method.name)
        return [*wrongly_joined(config, method, quantization, specs, rule)] if rule else []

    def check_spread(self, names: Iterable[str], served: ServingLayout) -> list[Finding]:
        """Why the engine does not divide a model with these tensors among GPUs, as a finding: they do not divide its
        heads; or its experts are to be dealt out whole, and there are none, or the GPUs do not divide their number."""
        if served.uneven:
            return [Finding("config.json", served.uneven, HEADS_EVENLY)]
        if self.spreads is None or not served.expert_parallel:
            return []
        names = list(names)
        counts = Counter((match[1], match[2]) for match in map(EXPERT.fullmatch, names) if match)
        if not counts and not any(experts_module(name.partition("[")[0]) for name in names):
            return [Finding("config.json", "a model without experts", self.spreads)]
        uneven = ((module, count) for (module, _), count in counts.items() if self.evenly and count % served.ranks)
        what = "{} experts on {} GPUs"
        return [Finding(module, what.format(count, served.ranks), self.spreads) for module, count in islice(uneven, 1)]

    def check_groups(self, served: ServingLayout) -> list[Finding]:
        """That GPUs would share a mixer's only group, where the engine does not let them beside codes, as a finding."""
        if self.whole_groups is None or not served.shares_rows:
            return []
        return [Finding("config.json", f"mixers of one group on {served.ranks} GPUs", self.whole_groups)]

    def check_stacked(self, names: Iterable[str], method: str, model_type: object) -> list[Finding]:
        """The first of these tensors whose form the engine does not load beside codes, as a finding: experts of a layer
        as one tensor of values, or one by one."""
        in_one = self.in_one.get(model_type) if isinstance(model_type, str) else None
        forms = {"as one tensor, in BF16": self.one_by_one.get(method), "one by one": in_one}
        found = ((name, form) for name in names for form, which in forms.items() if which and which.fullmatch(name))
        return [Finding(name, f"experts of a layer {form}", self.quantisation) for name, form in islice(found, 1)]

    def check_blocks(self, model_type: str, scheme: str, values: Iterable[str]) -> list[Finding]:
        """That a model is in another scheme than the engine has kernels for, or one of these `values` should be codes,
        as a finding."""
        alone = self.blocks_alone.get(model_type)
        if alone is None:
            return []
        if scheme != "block":
            return [Finding("config.json", f"{model_type} with {_in_words(scheme)}", alone.rule)]
        left = filter(alone.concerns, values)
        return [Finding(name, "values, and no codes", alone.rule) for name in islice(left, 1)]

    def takes_mxfp4(self, config: Mapping[str, Any], names: Iterable[str]) -> bool:
        """Whether the engine loads MXFP4 beside blocks of FP8 in a model, if only these weights are that."""
        return str(config.get("model_type")) in self.expert_dtype and all(map(EXPERT.fullmatch, names))

    def kept(
        self, config: Mapping[str, Any], method: str, values: Sequence[str], codes: Iterable[str], *, tied: bool
    ) -> list[str]:
        """The modules with `values` as a list has them that the engine leaves unquantized: under their own names and
        those that it may give them in memory, but none that it may give one of `codes`. `tied`: a head may be stored
        nowhere, under a name that only the model's class knows."""
        stacked = dict.fromkeys(experts for name in values if (experts := experts_module(name)))
        numbered = [EXPERT.fullmatch(f"{name}.weight") for name in values if method in self.experts_as_one]
        listed = (name for experts in stacked for name in self._listed_experts(experts, method))
        values = [*values, *stacked, *listed, *(match[1] for match in numbered if match)]
        if method == "compressed-tensors":  # the first by an expression, too: see `lost_by_renaming`
            values += [rf"re:{re.escape(experts)}\.0\..+" for experts in stacked if method in self.experts_in_list]
        values = list(dict.fromkeys(values))
        if not self.renames:
            return values
        codes = [name for name in codes if not EXPERT.fullmatch(f"{name}.weight")]  # they become one tensor
        taken = {name for names in possible(config, codes).values() for name in names}
        named = (name for names in possible(config, values).values() for name in names)
        heads = [f"re:{_HEADS}"] if tied and method == "compressed-tensors" else []
        heads = [] if any(re.match(_HEADS, name) for name in codes) else heads
        return list(dict.fromkeys([*values, *(name for name in named if name not in taken), *heads]))

    def _listed_experts(self, experts: str, method: str) -> list[str]:
        """The names by which the engine looks in the list for a layer's experts that are one tensor."""
        return [f"{experts}{within}" for within in self.experts_in_list.get(method, ())]

    def _unlisted_experts(self, directory: QuantizedDirectory) -> Iterator[Finding]:
        """Experts of a layer in one tensor, as values, that the engine takes for codes."""
        ignored = self._list_of(directory).of(directory.quantization)
        sliced = [name for name in directory.specs if name.endswith("]")]
        stacked = {experts: name for name in sliced if (experts := experts_module(name.partition("[")[0]))}
        for experts, name in stacked.items():
            linears = self._listed_experts(experts, directory.method) if name not in directory.scales else ()
            for linear in linears:
                if not ignored(linear):
                    what = f"{directory.specs[name].dtype} values, but `{linear}` is not ignored"
                    yield Finding(name, what, self.quantisation)
                    break

    def _list_of(self, directory: QuantizedDirectory) -> IgnoreList:
        return self.ignores.get((directory.method, directory.scheme)) or self.ignores[directory.method]

    def _names(self, config: Mapping[str, Any], directory: QuantizedDirectory) -> dict[str, list[str]]:
        """The names in memory under which the engine looks for modules in its list."""
        modules = [name.removesuffix(".weight") for name in linears(directory.specs)]
        if not self.renames or directory.method != "compressed-tensors":  # of others it renames the list too
            experts = {m: EXPERT.fullmatch(f"{m}.weight") for m in modules if directory.method in self.experts_as_one}
            return {module: [match[1] if (match := experts.get(module)) else module] for module in modules}
        alone = [module for module in modules if not EXPERT.fullmatch(f"{module}.weight")]  # experts become one tensor
        found = renamed(config, alone)
        return {module: found.get(module) or [module] for module in modules}


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of a config.json, with what MissingKeys have of a wrapper's."""
    of_the_whole = ("model_type", "quantization_config", OLDER_KEY)
    return {**{key: config.get(key) for key in of_the_whole}, **text_config(config)}


_HEADS = r"(\D*\.)?((\w+_)?lm_head|predictions|proj_out|embed_out|output_projection)(\.decoder|\.out_proj)?$"
"""Heads that are tied to an embedding, by the names of transformers' classes (5.23, `_tied_weights_keys`)."""


def engines() -> dict[str, Engine]:
    """Every engine in this folder, and of plug-ins, by the name that `--target` takes."""
    return discover_names(precisionctl.engines, "ENGINE", Engine, lambda engine: [engine.name])


def engine_named(name: str, *others: str) -> Engine:
    """The engine of a name. Raises RecipeError for another, with what is perhaps meant: an engine, or one of the
    `others` that may stand in its place."""
    known = engines()
    if name not in known:
        raise RecipeError(f"no engine `{name}`", do=nearest(name, (*known, *others)))
    return known[name]


def _kinds(method: QuantMethod, said: Quantization, scheme: str, coded: Mapping[str, CodedWeight]) -> dict[str, str]:
    """What the codes of each weight are: a scheme of FP8, or the name of packed ones. Where exports are written in the
    method, all have the `scheme` that the config says, and so have MXFP4 experts beside blocks (`expert_dtype`), unless
    the config has parts that differ, in their formats or in whether inputs have fixed scales."""
    formats_differ, inputs_differ = len({*said.by_target.values()}) > 1, said.by_target and said.static is None
    if said.blocks and method.spelling and not (formats_differ or inputs_differ):
        return dict.fromkeys(coded, scheme)
    return {name: kind_of(each.form, each.scales.input is not None) for name, each in coded.items()}


def _in_words(scheme: str) -> str:
    return f"{scheme} weights" if scheme in (*FOUR_BITS.values(), "INT8") else f"{scheme} activations"
