"""Which modules of a directory of codes stay values: how an engine reads the list of them, and by which names it looks
there."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from precisionctl.engines.rules.ignore_lists import (
    BY_NAME_OR_REGEX,
    Matching,
    is_of_a_class,
    names_in_layers,
    words,
)
from precisionctl.engines.rules.names_in_memory import module_names, possible
from precisionctl.engines.rules.rule import Breaches, QuantizedDirectory
from precisionctl.engines.serving import EXPERT, experts_module
from precisionctl.model.text_config import config_parts
from precisionctl.param import TensorSpec, is_slice
from precisionctl.quant_methods.compressed_tensors import config_groups

FIRST_EXPERT = (".0.gate_proj", ".0.up_proj", ".0.down_proj")
"""How vLLM and SGLang look for a layer's experts in the list of compressed-tensors: as linears of the first one."""

BY_MODULE = ("",)
"""How they look for them in other lists: as their module."""

_ROUTERS = r"gate|router|block_sparse_moe\.router\.layer"  # the last is Granite's, as in its files
ROUTERS = re.compile(rf".+\.({_ROUTERS})")
_OF_KIMI_K3 = r"routed_expert_(down|up)_proj|(self_attention|mlp|output_attn)_res_proj"
"""Projections around experts, and what weighs residual streams."""
ROUTERS_AND_GATES = re.compile(rf".+\.({_ROUTERS}|shared_expert_gate|{_OF_KIMI_K3})")
"""The gates are those of shared experts."""

_HEADS = r"(\D*\.)?((\w+_)?lm_head|predictions|proj_out|embed_out|output_projection)(\.decoder|\.out_proj)?$"
"""Heads that are tied to an embedding, by the names of transformers' classes (5.24, `_tied_weights_keys`)."""


TWO_KINDS_OF_EXPERTS = ("ernie4_5_vl_moe", "ernie4_5_vl_moe_text", "ernie4_5_moe_vl")
"""ERNIE 4.5 VL, whose layers have experts for text and others for images: in transformers its `model_type` and that of
its text model, and that of its own code, which published files have."""
_OF_EITHER_KIND = re.compile(r"(.+\.mlp)\.(?:(gate)|experts(\..+)?)")


def of_both_kinds(config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, list[str]]:
    """Of a model with two kinds of experts in a layer, each of these modules that is a router or within `experts`, and
    what vLLM and SGLang call those of both kinds: `text_experts_gate` and `vision_experts_gate`,
    `text_experts.0.up_proj` and so on. Nothing of other models. (vLLM 0.33 models/ernie45_vl_moe.py, SGLang 0.5.23
    models/ernie45_moe_vl.py)"""
    if config.get("model_type") not in TWO_KINDS_OF_EXPERTS:
        return {}
    found = {match[0]: match for match in map(_OF_EITHER_KIND.fullmatch, modules) if match}
    ends = {module: "_gate" if match[2] else match[3] or "" for module, match in found.items()}
    return {m: [f"{found[m][1]}.{kind}_experts{end}" for kind in ("text", "vision")] for m, end in ends.items()}


def linears(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Weights of two dimensions that are not embeddings: what `targets: [Linear]` means."""
    weights = [name for name, spec in specs.items() if name.endswith(".weight") and len(spec.shape) == 2]
    return [name for name in weights if "embed" not in name]


@dataclass(frozen=True)
class Unquantized:
    """Modules called so (`which`, by their names in memory) that an engine makes without quantization, but in `other`
    models, by the `model_type` of their text model."""

    which: re.Pattern[str]
    other: Sequence[str] = ()

    def concerns(self, module: str, model_type: object) -> bool | None:
        """Whether a module of a model is made so; None if it is not called so."""
        return model_type not in self.other if self.which.fullmatch(module) else None


def missing_v_proj(modules: Iterable[str], known: Container[str]) -> dict[str, str]:
    """Each `....k_proj` among these modules without a known `....v_proj` beside it (Gemma 4: keys are the values, too),
    and the name that this v_proj would have."""
    beside = {module: f"{module.removesuffix('k_proj')}v_proj" for module in modules if module.endswith(".k_proj")}
    return {k_proj: v_proj for k_proj, v_proj in beside.items() if v_proj not in known}


@dataclass(frozen=True)
class IgnoreList:
    """How an engine finds out which linears a `quantization_config` leaves unquantized.

    keys: where the list may be; the first that is not empty counts or, if `empty_counts`, the first that is there.
    matching: how its entries are read. heads_apart: a head is no linear, and is quantized only where a target names it.
    unquantized: modules that are values whatever the list says. experts: the suffixes that it appends to
    `...mlp.experts` when it looks up a layer's experts that are one tensor; none if it does not look for those.
    experts_as_one: it looks up experts that are stored one by one as `...mlp.experts`, too. in_memory: it looks under
    the names that modules have in memory, by transformers' own table. looks_up_missing_parts: it looks up all parts of
    what it fuses, also those that are stored nowhere. moved: of models, by the `model_type` of their text model, the
    modules that it makes within another one, after which their names are looked up: what they end in, and its name.
    """

    keys: tuple[str, ...]
    matching: Matching
    heads_apart: bool = False
    empty_counts: bool = False
    unquantized: Unquantized | None = None
    experts: Sequence[str] = ()
    experts_as_one: bool = False
    in_memory: bool = False
    looks_up_missing_parts: bool = False
    moved: Mapping[str, tuple[re.Pattern[str], str]] = field(default_factory=dict)

    def entries(self, quantization: Mapping[str, Any]) -> object:
        """The list; None if there is none."""
        lists = (quantization.get(key) for key in self.keys)
        return next((found for found in lists if found or (self.empty_counts and found is not None)), None)

    def of(self, quantization: Mapping[str, Any]) -> Callable[[str], bool]:
        """Whether a linear, by its module's name, is not quantized: it is no target, or it is on the list. Raises as
        `Matching.of`."""
        on_list, is_target = self.matching.of(words(self.entries(quantization))), self._targets(quantization)
        return lambda module: not is_target(module) or on_list(module)

    def _targets(self, quantization: Mapping[str, Any]) -> Callable[[str], bool]:
        """Whether a linear is a target: all but heads that are apart, where no target is said, or a class is one. None,
        in compressed-tensors without config groups (vLLM 0.33 compressed_tensors.py get_scheme_dict)."""
        layers = quantization.get("quantized_layers")
        if quantization.get("quant_algo") == "MIXED_PRECISION" and isinstance(layers, Mapping):
            return lambda module: any(name in layers for name in names_in_layers(module))
        groups = config_groups(quantization)
        if quantization.get("quant_method") == "compressed-tensors" and not groups:
            return lambda module: False
        targets = [target for group in groups.values() for target in group.targets]
        is_named = BY_NAME_OR_REGEX.of(targets)
        if targets and not any(map(is_of_a_class, targets)):
            return is_named
        return lambda module: is_named(module) or not (self.heads_apart and module.endswith("lm_head"))

    def kept(
        self, config: Mapping[str, Any], method: str, values: Sequence[str], codes: Sequence[str], *, tied: bool
    ) -> list[str]:
        """The modules with `values` as a list of this method has them so that the engine leaves them unquantized: under
        their own names and those by which it may look for them, but none by which it may look for one of `codes`.
        `tied`: a head may be stored nowhere, under a name that only the model's class knows."""
        stacked = dict.fromkeys(experts for name in values if (experts := experts_module(name)))
        numbered = [EXPERT.fullmatch(f"{name}.weight") for name in values if self.experts_as_one]
        listed = (f"{experts}{suffix}" for experts in stacked for suffix in self.experts)
        missing = missing_v_proj(values, {*values, *codes}) if self.looks_up_missing_parts else {}
        both = (name for names in of_both_kinds(config, values).values() for name in names)
        values = [*values, *missing.values(), *both, *stacked, *listed, *(match[1] for match in numbered if match)]
        if method == "compressed-tensors":  # the first by an expression, too: see `lost_by_renaming`
            values += [rf"re:{re.escape(experts)}\.0\..+" for experts in stacked if self.experts]
        values = list(dict.fromkeys(values))
        if not self.in_memory:
            return list(dict.fromkeys([*values, *(self._moved(config, name) for name in values)]))
        codes = [name for name in codes if not EXPERT.fullmatch(f"{name}.weight")]  # they become one tensor
        taken = {name for names in possible(config, codes).values() for name in names}
        named = (name for names in possible(config, values).values() for name in names)
        heads = [f"re:{_HEADS}"] if tied and method == "compressed-tensors" else []
        heads = [] if any(re.match(_HEADS, name) for name in codes) else heads
        return list(dict.fromkeys([*values, *(name for name in named if name not in taken), *heads]))

    def never(self, config: Mapping[str, Any], method: str, text_type: object, modules: Sequence[str]) -> Iterator[str]:
        """Those of these modules, by their names in the directory, that the engine makes without quantization whatever
        the list of this method says."""
        if self.unquantized:
            for module, called in self._names(config, method, modules).items():
                if any(self.unquantized.concerns(name, text_type) for name in called):
                    yield module

    def misread(self, directory: QuantizedDirectory) -> Breaches:
        """Linears that are codes and ignored, or neither: the engine would take one for the other."""
        is_ignored, text_type = self.of(directory.quantization), directory.text_type
        never = directory.spelling.never if directory.spelling else ()
        modules = {name.removesuffix(".weight"): name for name in linears(directory.specs)}
        in_memory = self._names(directory.config, directory.method, modules)
        for module, name in modules.items():
            coded = name in directory.scales
            for called in in_memory[module]:
                unquantized = self.unquantized.concerns(called, text_type) if self.unquantized else None
                ignored = is_ignored(called)
                which = "its module" if called == module else f"its module, in memory `{called}`,"
                if coded and (unquantized or ignored):
                    left = "never quantized" if unquantized else "ignored"
                    yield name, f"{directory.specs[name].codes_name} codes, but {which} is {left}"
                if unquantized is None:
                    unquantized = called.endswith(never)
                if not (coded or ignored or unquantized):
                    yield name, f"{directory.specs[name].dtype} values, but {which} is not ignored"

        for k_proj, v_proj in missing_v_proj(modules, modules).items() if self.looks_up_missing_parts else ():
            if (name := modules[k_proj]) not in directory.scales and not is_ignored(v_proj):
                yield name, f"{directory.specs[name].dtype} values, but `{v_proj}` is not ignored"

    def misread_experts(self, directory: QuantizedDirectory) -> Breaches:
        """Experts of a layer in one tensor, as values, that the engine takes for codes."""
        ignored = self.of(directory.quantization)
        sliced = [name for name in directory.specs if is_slice(name)]
        stacked = {experts: name for name in sliced if (experts := experts_module(name.partition("[")[0]))}
        for experts, name in stacked.items():
            looked_up = [f"{experts}{suffix}" for suffix in self.experts] if name not in directory.scales else []
            if linear := next((each for each in looked_up if not ignored(each)), None):
                yield name, f"{directory.specs[name].dtype} values, but `{linear}` is not ignored"

    def _names(self, config: Mapping[str, Any], method: str, modules: Iterable[str]) -> dict[str, list[str]]:
        """The names under which the engine looks for each of these linears."""
        modules = list(modules)
        if not self.in_memory or method != "compressed-tensors":  # of others it renames the list too
            experts = {m: EXPERT.fullmatch(f"{m}.weight") for m in modules if self.experts_as_one}
            found = {
                module: [match[1] if (match := experts.get(module)) else self._moved(config, module)]
                for module in modules
            }
            return found if self.in_memory else found | of_both_kinds(config, modules)
        alone = [module for module in modules if not EXPERT.fullmatch(f"{module}.weight")]  # experts become one tensor
        found = module_names(config, alone)
        return {module: found.get(module) or [module] for module in modules}

    def _moved(self, config: Mapping[str, Any], module: str) -> str:
        """The name of a module as the engine makes it."""
        ending, within = self.moved.get(str(config_parts(config)[-1].get("model_type")), (None, ""))
        found = ending.search(module) if ending else None
        return f"{module[: found.start()]}{within}{found[0]}" if found else module
