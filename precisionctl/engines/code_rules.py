"""What every engine asks of codes and their scales: dtypes, shapes, the list of ignored modules, and what is computed
as one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from precisionctl.dtypes import DType
from precisionctl.engines.ignore_lists import IgnoreList
from precisionctl.engines.rule import EngineRule, Finding, QuantizedDirectory
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.base import CODES, EXPONENTS, FLOATS, Scales

if TYPE_CHECKING:
    from torch import Tensor

EXPERT = re.compile(r"(.+\.experts)\.\d+\.(.+)\.weight")
_STACKED = re.compile(r"(.+\.experts)(?:\.[a-z_]+)?|(.+\.block_sparse_moe)\.(?:input|output)_linear(?:\.weight)?")


def experts_module(name: str) -> str | None:
    """What engines call the module of a layer's experts, of a tensor or module in which all of them are: Granite calls
    the tensors by other names. None for any other name."""
    match = _STACKED.fullmatch(name)
    return match and (match[1] or f"{match[2]}.experts")


def other_codes(scales: Mapping[str, Scales], specs: Mapping[str, TensorSpec], rule: EngineRule) -> Iterator[Finding]:
    """Weights whose FP8 codes are not E4M3, which no engine takes."""
    for name in scales:
        if specs[name].packing is None and specs[name].dtype != CODES:
            yield Finding(name, f"{specs[name].dtype} codes", rule)


def wrong_scales(directory: QuantizedDirectory, rule: EngineRule) -> Iterator[Finding]:
    """Scales of a shape or dtype that the scheme does not have."""
    specs, exponents = directory.specs, {"block": (*FLOATS, DType.float8_e8m0fnu), "mxfp8": EXPONENTS}
    for weight, scales in directory.scales.items():
        if specs[weight].packing or directory.spelling is None:
            continue  # such codes are not recognised with others
        scheme = directory.kinds[weight]
        dtypes = exponents.get(scheme, FLOATS)
        for name, spec in directory.spelling.specs(scales, specs[weight], scheme).items():
            stored = specs[name]
            one = stored.rows * stored.columns == 1  # [] and [1] are loaded alike
            if stored.shape != spec.shape and not one:
                yield Finding(name, f"shape {list(stored.shape)}, not {list(spec.shape)}", rule)
            if stored.dtype not in dtypes:
                yield Finding(name, f"{stored.dtype}, not {spec.dtype}", rule)


def wrongly_ignored(
    directory: QuantizedDirectory,
    ignore_list: IgnoreList,
    in_memory: Mapping[str, Sequence[str]],
    rule: EngineRule,
    is_unquantized: Callable[[str], bool | None],
) -> Iterator[Finding]:
    """Linears that are codes and ignored, or neither: the engine would misread both. `is_unquantized` says of modules
    that the list does not matter (None: it does)."""
    is_ignored = ignore_list.of(directory.quantization)
    never = directory.spelling.never if directory.spelling else ()
    for name in linears(directory.specs):
        module, coded = name.removesuffix(".weight"), name in directory.scales
        for called in in_memory[module]:
            unquantized, ignored = is_unquantized(called), is_ignored(called)
            which = "its module" if called == module else f"its module, in memory `{called}`,"
            if coded and (unquantized or ignored):
                left = "never quantized" if unquantized else "ignored"
                yield Finding(name, f"{directory.specs[name].codes_name} codes, but {which} is {left}", rule)
            if unquantized is None:
                unquantized = called.endswith(never)
            if not (coded or ignored or unquantized):
                yield Finding(name, f"{directory.specs[name].dtype} values, but {which} is not ignored", rule)


def linears(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Weights of two dimensions that are not embeddings: what `targets: [Linear]` means."""
    weights = [name for name, spec in specs.items() if name.endswith(".weight") and len(spec.shape) == 2]
    return [name for name in weights if "embed" not in name]


def fused_weights(specs: Mapping[str, Any], groups: Iterable[tuple[str, ...]]) -> Iterator[list[str]]:
    """The weights of each group of linears that engines fuse."""
    for group in groups:
        first = f".{group[0]}.weight"
        for name in specs:
            if name.endswith(first):
                stem = name.removesuffix(first)
                yield [found for part in group if (found := f"{stem}.{part}.weight") in specs]


def _experts(names: Iterable[str]) -> dict[tuple[str, str], list[str]]:
    """The weights of a layer's experts, by their part: an engine gives them one scheme, and one input scale."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in names:
        if match := EXPERT.fullmatch(name):
            found.setdefault((match[1], match[2]), []).append(name)
    return found


def partly_quantized(
    directory: QuantizedDirectory, rule: EngineRule, fused: Iterable[tuple[str, ...]]
) -> Iterator[Finding]:
    """Fused linears, or a layer's experts, of which only some are codes, or in another format."""
    scales, specs, kinds = directory.scales, directory.specs, directory.kinds
    for group in (*fused_weights(specs, fused), *_experts(specs).values()):
        quantised = [name for name in group if name in scales]
        if quantised and len(quantised) < len(group):
            yield Finding(
                quantised[0], f"{specs[quantised[0]].codes_name} codes, but not all that it is fused with", rule
            )
        formats = {
            (kinds[name], specs[name].packing, specs[name].dtype, scales[name].input is None) for name in quantised
        }
        if len(formats) > 1:
            yield Finding(quantised[0], "codes in another format than those that it is fused with", rule)


def unequal_in_group(
    scales: Mapping[str, Scales],
    read: Callable[[str], Tensor],
    fixed: EngineRule,
    global_ones: EngineRule,
    fused: Iterable[tuple[str, ...]],
) -> Iterator[Finding]:
    """Fused linears with static scales, or global ones, that differ."""
    for group in fused_weights(scales, fused):
        found = [scales[name] for name in group]
        static = [each for each in found if each.input is not None]
        for kind, names, rule in (
            ("weight", [each.weight for each in static if each.global_scale is None], fixed),
            ("global weight", [each.global_scale for each in found if each.global_scale], global_ones),
            ("input", [each.input for each in static if each.input], fixed),
        ):
            values = [float(value) for name in names if (value := read(name)).numel() == 1]  # not of channels
            if len(set(values)) > 1:
                yield Finding(group[0], f"{kind} scales {values} of one fused group differ", rule)


def unequal_experts(scales: Mapping[str, Scales], read: Callable[[str], Tensor], rule: EngineRule) -> Iterator[Finding]:
    """Layers whose experts have static input scales that differ."""
    for experts in _experts(scales).values():
        inputs = {float(read(tensors.input)) for name in experts if (tensors := scales[name]).input is not None}
        if len(inputs) > 1:
            yield Finding(experts[0], f"input scales of experts differ, {min(inputs)} to {max(inputs)}", rule)
