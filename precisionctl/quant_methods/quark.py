"""AMD's Quark (`weight_scale`, `input_scale`): scale_inv; `[]`, `[rows]`, or exponents as bytes.

vLLM, SGLang and transformers (with the package `amd-quark`) read it. The JSON is that of Quark's QConfig.to_dict
(0.13, quark/torch/quantization/config/config.py), beside what was asked of the export. It is read here, and written
back with the old codes; no export is made in it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from precisionctl.codes.elements import E2M1
from precisionctl.errors import PrecisionError, shown
from precisionctl.quant_methods.base import (
    CHANNEL,
    MXFP4,
    TENSOR,
    InputFormat,
    Quantization,
    QuantMethod,
    combined,
    in_fp8,
)

_NOT_WEIGHTS = ("rotation", "quarot", "svd")
"""Parts of names of algorithms after which codes and scales alone are not the weights: inputs are rotated, or a part of
low rank is to be added. Others (smoothing, AWQ, GPTQ) leave plain weights behind."""


def read(config: Mapping[str, Any]) -> Quantization:
    """The formats of all layers, by whatever patterns these are named; which one a weight has follows from its tensors.

    Raises PrecisionError for numbers that are not read, weights in several steps, biases in codes, and codes that are
    not the weights.
    """
    kept = _part(config, "export").get("weight_format", "real_quantized")
    if kept != "real_quantized":
        raise _unread(f"weight_format is {shown(kept)}")
    for key in ("algo_config", "pre_quant_opt_config"):
        algorithms = config.get(key) or []
        for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
            name = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
            if any(word in str(name).lower() for word in _NOT_WEIGHTS):
                raise _unread(f"codes of {shown(name)} are not the weights")
    layers = [("", _part(config, "global_quant_config"))]
    for key in ("layer_type_quant_config", "layer_quant_config", "kv_cache_quant_config"):
        by_name = _part(config, key)
        layers += [(name, _part(by_name, name)) for name in by_name]
    for _, layer in layers:
        if layer.get("bias"):
            raise _unread(f"biases are {_in_words(_tensor(layer, 'bias'))}")
        outputs = _tensor(layer, "output_tensors")
        if outputs and _in_short(outputs) != _FIXED:  # those of k and v are cached
            raise _unread(f"outputs are {_in_words(outputs)}")
    parts = [([name], _layer(layer)) for name, layer in layers if layer.get("weight")]
    if not parts:
        raise _unread("no weight is quantized")
    return combined(parts)


def _layer(layer: Mapping[str, Any]) -> Quantization:
    """The formats of the weights of some layers, and how their inputs are rounded."""
    weight, inputs = _tensor(layer, "weight"), _tensor(layer, "input_tensors")
    kind = tuple(weight.get(key) for key in ("dtype", "qscheme"))
    if weight.get("is_dynamic") or weight.get("symmetric") is False:
        raise _unread("weights have zero points, or no scales")
    if kind == ("fp4", "per_group") and (weight.get("group_size"), weight.get("scale_format")) == (32, "e8m0"):
        if not inputs:
            return Quantization((MXFP4,), None)
        how = tuple(inputs.get(key) for key in ("dtype", "qscheme", "group_size", "scale_format", "is_dynamic"))
        if how != ("fp4", "per_group", 32, "e8m0", True) or inputs.get("scale_calculation_mode", "even") != "even":
            raise _unread(f"inputs of MXFP4 weights are {_in_words(inputs)}")
        return Quantization((replace(MXFP4, inputs=InputFormat(E2M1, even=True)),), None)
    of_channels = kind[1] == "per_channel" and weight.get("ch_axis") == 0
    if kind[0] != "fp8_e4m3" or not (of_channels or kind[1] == "per_tensor"):
        raise _unread(f"weights are {_in_words(weight)}")
    if _in_short(inputs) not in (_FIXED, _BY_TOKEN):
        raise _unread(f"inputs of FP8 weights are {_in_words(inputs)}")
    return in_fp8([CHANNEL if of_channels else TENSOR], _in_short(inputs) == _FIXED)


def _in_short(tensor: Mapping[str, Any]) -> tuple[object, object, bool]:
    return tensor.get("dtype"), tensor.get("qscheme"), bool(tensor.get("is_dynamic"))


_FIXED, _BY_TOKEN = ("fp8_e4m3", "per_tensor", False), ("fp8_e4m3", "per_channel", True)


def _tensor(layer: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """How one tensor of a layer is quantized; empty if it is not. Raises PrecisionError for several steps."""
    if isinstance(steps := layer.get(key), list):
        what = " and ".join(_in_words(step) for step in steps if isinstance(step, Mapping))
        raise _unread(f"{key} is quantized in {len(steps)} steps: {what}")
    return _part(layer, key)


def _part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key)
    if not found:
        return {}
    if not isinstance(found, Mapping):
        raise _unread(f"`{key}` is {shown(found)}")
    return found


def _in_words(tensor: Mapping[str, Any]) -> str:
    """How a tensor is quantized, by the words of the config."""
    keys = ("dtype", "qscheme", "group_size", "ch_axis", "is_dynamic", "scale_format", "scale_calculation_mode")
    said: Iterable[str] = (f"{key} {shown(tensor[key])}" for key in keys if tensor.get(key) is not None)
    return ", ".join(said) or "not quantized"


def _unread(why: str) -> PrecisionError:
    return PrecisionError(
        f"this configuration of Quark cannot be read: {why}",
        where="config.json",
        do="Known: fp8_e4m3 per tensor or per channel, with inputs in it; fp4 per group of 32 with e8m0 "
        "scales, with inputs in it or not. Start from the unquantized model.",
    )


QUANT_METHOD = QuantMethod(name="quark", read=read)
