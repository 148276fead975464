"""Rules on codes that are integers, which compressed-tensors stores as bytes or packed into words.

Each function yields where a directory breaks a rule, and how; an engine pairs it with its own text and source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from precisionctl.engines.rules.demands import CONFIG, beyond_bf16
from precisionctl.engines.rules.fused_rules import fused_weights
from precisionctl.engines.rules.rule import Breaches, Demand, QuantizedDirectory
from precisionctl.engines.serving import EXPERT, FUSED, LATENT
from precisionctl.quant_methods.base import TENSOR, sized
from precisionctl.quant_methods.compressed_tensors import ConfigGroup, config_groups

_BYTES, _WORDS = ("int-quantized", "naive-quantized"), "pack-quantized"


def int8_of_no_scheme(*, inputs_of_words: bool) -> Demand:
    """Config groups of INT8 that are neither bytes, with weights per tensor or channel and inputs in INT8, nor words,
    with weights per channel or group, whose inputs stay as they are or, if an engine has kernels for `inputs_of_words`,
    are INT8 with symmetric scales of tokens."""

    def broken(directory: QuantizedDirectory) -> Breaches:
        for name, group in _int8_groups(directory.quantization):
            assert group.weights is not None
            inputs, layout, strategy = group.inputs, group.layout, group.weights.strategy
            if layout in _BYTES:
                fits = strategy in ("tensor", "channel") and inputs is not None
            else:
                by_token = inputs is not None and inputs.dynamic and inputs.symmetric
                of_words = layout == _WORDS and strategy in ("channel", "group")
                fits = of_words and (not inputs or bool(inputs_of_words and by_token))
            if not fits:
                of_inputs = "with" if inputs else "without"
                yield CONFIG, f"config group {name}: INT8 per {strategy}, {of_inputs} INT8 inputs, as {layout!r}"

    return broken


def zero_points_of(*bits: int) -> Demand:
    """Weights with zero points, of integers of so many bits: the first."""

    def broken(directory: QuantizedDirectory) -> Breaches:
        for name, scales in directory.scales.items():
            if scales.zero_points is not None and directory.specs[name].element.bits in bits:
                yield scales.zero_points, "zero points of weights"
                return

    return broken


def int8_inputs_of_group_unequal(directory: QuantizedDirectory) -> Breaches:
    """Fused linears in INT8 whose fixed input scales or zero points differ."""
    for group in fused_weights(directory.scales, (*FUSED, LATENT)):
        fixed = [name for name in group if _of_int8(directory, name) and directory.scales[name].input is not None]
        found: set[tuple[float, ...]] = set()
        for scales in (directory.scales[name] for name in fixed):
            stored = (scales.input, scales.input_zero_point)
            found.add(tuple(float(directory.read(each).reshape(())) if each else 0.0 for each in stored))
        if len(found) > 1:
            yield fixed[0], f"input scales, with zero points, {sorted(found)} of one fused group differ"


def int8_inputs_fixed(directory: QuantizedDirectory) -> Breaches:
    """Fixed scales of inputs of INT8 weights: the first."""
    for name, scales in directory.scales.items():
        if scales.input is not None and _of_int8(directory, name):
            yield scales.input, "a fixed scale of inputs"
            return


def int8_inputs_shifted(directory: QuantizedDirectory) -> Breaches:
    """Inputs in INT8 with zero points."""
    for name, group in _int8_groups(directory.quantization):
        if group.inputs and group.inputs.symmetric is False:
            yield CONFIG, f"config group {name}: inputs with zero points"


def int8_of_a_tensor(directory: QuantizedDirectory) -> Breaches:
    """A weight in INT8 with one scale: the first."""
    for name, scales in directory.scales.items():
        if _of_int8(directory, name) and scales.block == sized(TENSOR, directory.specs[name]):
            yield scales.weight, "one scale of a whole weight"
            return


def int8_experts(*, by_token: bool) -> Demand:
    """Experts in bytes: the first. Of an engine that takes them with a scale for each channel and inputs `by_token`,
    the first that has other scales."""

    def broken(directory: QuantizedDirectory) -> Breaches:
        for name, scales in directory.scales.items():
            if not (EXPERT.fullmatch(name) and _of_int8(directory, name) and scales.shape is None):
                continue
            of_tensor = scales.block == sized(TENSOR, directory.specs[name])
            if not by_token or of_tensor or scales.input is not None:
                how = "one scale of a whole weight" if of_tensor else "a fixed scale of inputs"
                yield name, f"an expert's INT8 codes in bytes{f', with {how}' if by_token else ''}"
                return

    return broken


def scales_of_words_beyond_bf16(directory: QuantizedDirectory) -> Breaches:
    """Scales of packed integers that are not exact in BF16: the first."""
    yield from beyond_bf16(directory, [each.weight for each in directory.scales.values() if each.shape is not None])


def _of_int8(directory: QuantizedDirectory, name: str) -> bool:
    element = directory.specs[name].element
    return element.is_integer and element.bits == 8


def _int8_groups(quantization: Mapping[str, Any]) -> Iterator[tuple[str, ConfigGroup]]:
    """The config groups with weights in INT8, by their names."""
    for name, group in config_groups(quantization).items():
        if group.weights and group.weights.are_int8:
            yield name, group
