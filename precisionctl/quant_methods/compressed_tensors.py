"""compressed-tensors (`weight_scale`, `input_scale`): scale_inv; `[1]`, `[rows, 1]`, or a grid for blocks. Packed
codes are `weight_packed`; global scales of NVFP4 are divisors, 2688 / amax.

The format of llm-compressor; vLLM, SGLang and transformers read it. Written without every key that has a default:
older readers refuse keys that they do not know.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from precisionctl.codes.elements import E2M1, E4M3, INT4, INT8, INT8_PLUS_128, Element, Packing
from precisionctl.dtypes import DType
from precisionctl.errors import PrecisionError, shown
from precisionctl.quant_methods.base import (
    CHANNEL,
    EXPONENTS,
    FLOATS,
    OF_CACHE_ALONE,
    SCHEMES,
    TENSOR,
    Block,
    CacheSpelling,
    CodeFormat,
    InputFormat,
    Quantization,
    QuantMethod,
    Scheme,
    Spelling,
    block_of,
    combined,
    in_fp8,
)

OLDER_KEY = "compression_config"
"""What compressed-tensors called its `quantization_config` in 2024."""

_NVFP4 = CodeFormat(
    (1, 16),
    Packing("NVFP4", E2M1, DType.uint8, "_packed"),
    (DType.float8_e4m3fn,),
    global_scale="weight_global_scale",
    divides=True,
    input="input_global_scale",
)
_MXFP4 = CodeFormat((1, 32), Packing("MXFP4", E2M1, DType.uint8, "_packed"), EXPONENTS)
_INT4 = CodeFormat(CHANNEL, Packing("INT4", INT4, DType.int32, "_packed"), FLOATS, shape="weight_shape")
_INT8 = CodeFormat(CHANNEL, Packing("INT8", INT8, DType.int8), FLOATS)
_INT8_PACKED = CodeFormat(CHANNEL, Packing("INT8", INT8_PLUS_128, DType.int32, "_packed"), FLOATS, shape="weight_shape")


@dataclass(frozen=True)
class _Written:
    """How a scheme is written: the arguments of `weights` and of `inputs`, the `layout` of the codes, which is the
    config's `format`, and in four bits what codes are (`form`)."""

    weights: dict[str, Any]
    inputs: dict[str, Any] | None
    layout: str = "float-quantized"
    form: CodeFormat | None = None


_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_MX = _FP8 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
_NV = _FP4 | {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
_MX4 = _FP4 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
_STORED, _FOUND = {"dynamic": False}, {"dynamic": True}
_TENSOR = _FP8 | {"strategy": "tensor"} | _STORED

_WRITTEN: Mapping[Scheme, _Written] = {
    "static": _Written(_TENSOR, _TENSOR),
    "dynamic": _Written(_FP8 | {"strategy": "channel"} | _STORED, _FP8 | {"strategy": "token"} | _FOUND),
    "mxfp8": _Written(_MX | _STORED, _MX | _FOUND, "mxfp8-quantized"),
    "nvfp4": _Written(_NV | _STORED, _NV | {"dynamic": "local"}, "nvfp4-pack-quantized", _NVFP4),
    "nvfp4a16": _Written(_NV | _STORED, None, "nvfp4-pack-quantized", _NVFP4),
    "mxfp4": _Written(_MX4 | _STORED, _MX4 | _FOUND, "mxfp4-pack-quantized", _MXFP4),
    "w4a16": _Written(
        _W4 | _STORED,
        None,
        "pack-quantized",
        replace(_INT4, block=SCHEMES["w4a16"].block, scales=(DType.bfloat16,)),
    ),
}


def config(scheme: Scheme, ignored: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config`: one group, of all linears but those that are ignored."""
    written = _WRITTEN[scheme]
    group: dict[str, Any] = {"targets": ["Linear"], "weights": written.weights, "input_activations": written.inputs}
    if written.form:
        group["format"] = written.layout
    return {
        "quant_method": "compressed-tensors",
        "format": written.layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
    }


def read(config: Mapping[str, Any]) -> Quantization:
    """Reads what llm-compressor and others write too: several groups, blocks, weights alone, MXFP8, INT8.

    Raises PrecisionError for others.
    """
    found = config.get("config_groups")
    groups = list(found.values()) if isinstance(found, Mapping) else []
    parts = [(_targets(group), _group(group, config.get("format"))) for group in groups]
    cache = config.get("kv_cache_scheme")
    if not (parts or isinstance(cache, Mapping)):
        raise _unread("there are no groups")
    if _is_there(config.get("sparsity_config")) or _is_there(config.get("transform_config")):
        raise _unread("weights are packed as sparse, or were transformed")
    if isinstance(cache, Mapping) and (cache.get("num_bits", 8), cache.get("type", "int")) != (8, "float"):
        raise _unread("the KV cache is not in FP8")
    return combined(parts) if parts else OF_CACHE_ALONE


def _group(group: object, layout: object) -> Quantization:
    """`layout` is the config's `format`, for groups that have none of their own."""
    weights, inputs = (_arguments(group, part) for part in ("weights", "input_activations"))
    own = group.get("format") if isinstance(group, Mapping) else None
    if weights is not None and weights.get("num_bits") == 4:
        return Quantization((_four_bits(weights, inputs, own or layout),), None)
    if weights is not None and (weights.get("num_bits", 8), weights.get("type", "int")) == (8, "int"):
        return _int8(weights, inputs, own or layout)
    if weights is None or weights.get("num_bits") != 8 or weights.get("type") != "float":
        raise _unread("weights are neither of 4 bits nor of 8")
    if weights.get("symmetric") is False or weights.get("dynamic"):
        raise _unread("weights have zero points, or no scales")
    strategy = weights.get("strategy")
    if strategy == "block":
        block: Block = block_of(weights.get("block_structure"))
    elif strategy == "group" and type(size := weights.get("group_size")) is int and size > 0:
        block = (1, size)
    elif strategy in ("tensor", "channel"):
        block = TENSOR if strategy == "tensor" else CHANNEL
    else:
        raise _unread(f"strategy {shown(strategy)}")
    static = inputs is not None and not inputs.get("dynamic") and inputs.get("strategy") == "tensor"
    found = in_fp8([block], static, inputs=_inputs(inputs, (E4M3,)))
    is_mxfp8 = (own or layout) not in ("float-quantized", "naive-quantized")  # its layout has its name
    if block == SCHEMES["mxfp8"].block and not is_mxfp8:
        return replace(found, formats=tuple(replace(form, scales=FLOATS) for form in found.formats))
    return found


def _inputs(inputs: Mapping[str, Any] | None, known: Sequence[Element]) -> InputFormat | None:
    """What inputs become, of the formats that are `known` beside such weights; None where they stay as they are."""
    if inputs is None:
        return None
    bits, kind = inputs.get("num_bits", 8), inputs.get("type", "int")
    for element in known:
        if (bits, kind) == (element.bits, "int" if element.is_integer else "float"):
            return InputFormat(element, zero_point=element.is_integer and inputs.get("symmetric", True) is not True)
    said = (f"{key} {shown(inputs[key])}" for key in ("num_bits", "type", "strategy", "dynamic") if key in inputs)
    return InputFormat(None, ", ".join(said))


def fixes_inputs(group: Mapping[str, Any]) -> bool:
    """Whether a config group says that inputs have a fixed scale, which may be a global one."""
    inputs = _arguments(group, "input_activations")
    if inputs is None or inputs.get("dynamic") is True:
        return False
    return inputs.get("strategy") in ("tensor", "tensor_group")


def _targets(group: object) -> list[str]:
    """The names, patterns and classes of modules that a group is for."""
    found = group.get("targets") if isinstance(group, Mapping) else None
    return [target for target in found if isinstance(target, str)] if isinstance(found, list) else []


def _four_bits(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, layout: object) -> CodeFormat:
    kind, strategy, size = (weights.get(key) for key in ("type", "strategy", "group_size"))
    symmetric = _symmetric(weights)
    if kind == "float" and symmetric and (strategy, size) == ("tensor_group", 16):
        made = _inputs(inputs, (E2M1,))
        return _NVFP4 if made is None or made.element else replace(_NVFP4, inputs=made)  # theirs is a fixed scale
    if kind == "float" and symmetric and (strategy, size) == ("group", 32):
        return replace(_MXFP4, inputs=_inputs(inputs, (E2M1,)))
    if kind != "int":
        raise _unread(f"4-bit {shown(kind)} weights of strategy {shown(strategy)}, groups of {shown(size)}")
    if layout in _IN_BYTES:
        raise PrecisionError(
            f"these are INT4 weights with a byte for each code ({layout!r}), as llm-compressor stores those with "
            "inputs in FP8 (W4AFP8) or INT8 (W4A8)",
            where="config.json",
            do='INT4 is read in words of eight: save the model again with `quantization_format="pack-quantized"`.',
        )
    by_token = inputs is None or (inputs.get("strategy"), inputs.get("dynamic", False)) == ("token", True)
    form = replace(_INT4, block=_block_of_integers(weights), inputs=_inputs(inputs, (E4M3,) if by_token else ()))
    return form if symmetric else replace(form, zero_points="weight_zero_point")


_IN_BYTES = ("int-quantized", "naive-quantized")
_LAYOUTS = {**dict.fromkeys(_IN_BYTES, (_INT8,)), "pack-quantized": (_INT8_PACKED,)}


def _int8(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, layout: object) -> Quantization:
    """Bytes, or words of four; zero points are read beside words alone. Inputs are rounded to INT8 too, by one fixed
    scale or by one for each token, or stay as they are."""
    symmetric = _symmetric(weights)
    block = TENSOR if weights.get("strategy") == "tensor" and symmetric else _block_of_integers(weights)
    known = _LAYOUTS.get(layout, (_INT8, _INT8_PACKED)) if isinstance(layout, str) else (_INT8, _INT8_PACKED)
    forms = [replace(form, block=block) for form in known]
    if not symmetric:
        forms = [replace(form, zero_points="weight_zero_point") for form in forms if form.shape]
    if not forms:
        raise _unread("8-bit weights have zero points that are not packed")
    if inputs is None:
        return Quantization(tuple(forms), None)
    fixed = (inputs.get("strategy"), inputs.get("dynamic", False)) == ("tensor", False)
    by_token = (inputs.get("strategy"), inputs.get("dynamic", False)) == ("token", True)
    if (inputs.get("num_bits", 8), inputs.get("type", "int")) != (8, "int") or not (fixed or by_token):
        raise _unread("inputs of 8-bit integer weights are no 8-bit integers under one fixed scale, or one of a token")
    made = _inputs(inputs, (INT8,)) if by_token else None
    zero_point = None if by_token or inputs.get("symmetric", True) is True else "input_zero_point"
    given = "input_scale" if fixed else None
    forms = [replace(form, input=given, input_zero_point=zero_point, inputs=made) for form in forms]
    return Quantization(tuple(forms), fixed)


def _symmetric(weights: Mapping[str, Any]) -> bool:
    """Whether weights have no zero points. Raises PrecisionError for those that have no scales."""
    symmetric = weights.get("symmetric", True)
    if weights.get("dynamic") or type(symmetric) is not bool:
        raise _unread("weights have no scales")
    return symmetric


def _block_of_integers(weights: Mapping[str, Any]) -> Block:
    """The groups or channels of integers. Raises PrecisionError for groups of inputs in another order."""
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if weights.get("actorder") in ("group", "dynamic"):
        raise _unread("groups are of inputs in another order (actorder)")
    groups = strategy == "group" and type(size) is int and 0 < size < 1 << 31
    if not (groups or strategy == "channel"):
        bits = weights.get("num_bits", 8)
        raise _unread(f"{bits}-bit 'int' weights of strategy {shown(strategy)}, groups of {shown(size)}")
    return (1, size if groups else None)


def _arguments(group: object, part: str) -> Mapping[str, Any] | None:
    found = group.get(part) if isinstance(group, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _is_there(part: object) -> bool:
    """Whether a part of the config does anything; tools write empty ones, and a sparsity that is none."""
    return bool(part) and not (isinstance(part, Mapping) and part.get("format") == "dense")


def _unread(why: str) -> PrecisionError:
    return PrecisionError(
        f"these compressed-tensors config groups are not of a kind that can be read: {why}",
        where="config.json",
        do="Known: 8-bit floating point with one scale for a tensor, a channel, a block or a group; NVFP4; MXFP4; "
        "integers of 4 or 8 bits with one for a channel or a group of inputs in their order.",
    )


QUANT_METHOD = QuantMethod(
    name="compressed-tensors",
    read=read,
    spelling=Spelling(
        config=config,
        cache=CacheSpelling(("k_scale", "v_scale"), (1,), {"kv_cache_scheme": _TENSOR}, as_bf16=False),
        shape=lambda block, grid: (1,) if block == TENSOR else grid,
        four_bits={scheme: written.form for scheme, written in _WRITTEN.items() if written.form},
    ),
)
