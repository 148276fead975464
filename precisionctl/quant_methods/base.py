"""QuantMethod: one way of spelling FP8 in a Hugging Face directory, to write it and to read it.

A new one is a file in this folder with a `QUANT_METHOD` in it. Every scale tensor of every method here holds
scale_inv, whatever its name: the dequantize multiplier `x = code * scale_inv`, which is amax / 448.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import precisionctl.quant_methods
from precisionctl.discover import discover
from precisionctl.errors import DamagedCheckpoint, PrecisionError
from precisionctl.fp8.encoding import Encoding
from precisionctl.param import TensorSpec

Scheme = Literal["static", "dynamic"]
"""`static`: a scale for each weight and one, fixed, for its input. `dynamic`: a scale for each output channel,
and one for each token that the engine makes while it runs."""

CODES = torch.float8_e4m3fn
"""What every engine reads; none takes E5M2 weights."""


@dataclass(frozen=True)
class Scales:
    """The tensors that hold a quantised weight's scale_inv and its input's; `input` is None where it is dynamic."""

    weight: str
    input: str | None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,) if self.input is None else (self.weight, self.input)


@dataclass(frozen=True)
class QuantMethod:
    """`name` is config.json's `quant_method`; shapes are those of its scale tensors.

    `config(scheme, ignored)` is the `quantization_config` that spells `scheme`, with the full names of the linear
    and embedding modules that are not quantised; `files` are the files beside it, by name. `scheme(config)` reads
    a `quantization_config` back, from whatever tool; it raises PrecisionError for what cannot be read.
    """

    name: str
    tensor_scale: tuple[int, ...]
    channel_scale: Callable[[int], tuple[int, ...]]
    config: Callable[[Scheme, Sequence[str]], dict[str, Any]]
    files: Callable[[Scheme, Sequence[str]], dict[str, bytes]]
    scheme: Callable[[Mapping[str, Any]], Scheme]

    def scales(self, weight: str, scheme: Scheme) -> Scales:
        """The names of the scales of `<module>.weight`."""
        module = weight.removesuffix(".weight")
        return Scales(f"{module}.weight_scale", f"{module}.input_scale" if scheme == "static" else None)

    def specs(self, weight: str, rows: int, scheme: Scheme) -> dict[str, TensorSpec]:
        """The scale tensors to store beside a weight of `rows` output channels, all FP32."""
        scales = self.scales(weight, scheme)
        if scales.input is None:
            return {scales.weight: TensorSpec(self.channel_scale(rows), torch.float32)}
        return {name: TensorSpec(self.tensor_scale, torch.float32) for name in scales.names}


def quant_methods() -> dict[str, QuantMethod]:
    """Every method in this folder, by its name in config.json."""
    methods: list[QuantMethod] = discover(precisionctl.quant_methods, "QUANT_METHOD")
    return {method.name: method for method in methods}


def recognise(config: Mapping[str, Any], where: object = "config.json") -> QuantMethod | None:
    """The method that a config.json names; None where it names none.

    Raises PrecisionError for an unknown one, DamagedCheckpoint for what is none.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    if not isinstance(quantization, Mapping):
        raise DamagedCheckpoint("`quantization_config` is no object", where=where)
    methods, name = quant_methods(), quantization.get("quant_method")
    if not isinstance(name, str) or name not in methods:
        known = ", ".join(methods)
        raise PrecisionError(f"quant_method {name!r} is not one that can be read", where=where, do=f"Known: {known}.")
    return methods[name]


def stored_scales(
    config: Mapping[str, Any], specs: Mapping[str, TensorSpec], where: object = "config.json"
) -> dict[str, Scales]:
    """Where the scales of every weight that is FP8 codes are, by the weight's name.

    `config` is all of config.json, `specs` every stored tensor, scales among them. Raises PrecisionError for a
    method or scheme that cannot be read, DamagedCheckpoint for codes whose scales are missing or misshapen.
    """
    method = recognise(config, where)
    codes = [name for name, spec in specs.items() if spec.dtype == CODES]
    if method is None:
        if codes:
            raise DamagedCheckpoint(f"{codes[0]} is FP8 codes but there is no `quantization_config`", where=where)
        return {}
    scheme = method.scheme(config["quantization_config"])
    scales = {name: method.scales(name, scheme) for name in codes}
    for weight, tensors in scales.items():
        for name in tensors.names:
            _check_scale(name, specs, {1, specs[weight].rows} if name == tensors.weight else {1}, where)
    return scales


def _check_scale(name: str, specs: Mapping[str, TensorSpec], sizes: set[int], where: object) -> None:
    if name not in specs:
        raise DamagedCheckpoint(f"no {name} for its FP8 codes", where=where, do="Is every shard there?")
    if specs[name].rows * specs[name].columns not in sizes:
        raise DamagedCheckpoint(
            f"{name} has shape {list(specs[name].shape)}, not one scale or one per row", where=where
        )


def encoding(scale: Tensor) -> Encoding:
    """How codes with this stored scale tensor (of any dtype and method) decode."""
    scale_inv = scale.float()
    return Encoding(CODES, scale_inv.reshape(()) if scale_inv.numel() == 1 else scale_inv.reshape(-1, 1))
