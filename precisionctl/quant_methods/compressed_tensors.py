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
from precisionctl.untrusted.safe_json import mapping_or_empty

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


@dataclass(frozen=True)
class TensorArguments:
    """What a config says of weights, inputs or a KV cache, with the defaults of compressed-tensors 0.20
    (quantization/quant_args.py, QuantizationArgs). A stranger's config may have anything in the place of a value."""

    bits: object = 8
    kind: object = "int"
    strategy: object = "tensor"
    group_size: object = None
    symmetric: object = True
    dynamic: object = False
    block: object = None
    order: object = None

    @classmethod
    def of(cls, said: object) -> "TensorArguments | None":
        """None where nothing is said, or what are no arguments."""
        if not isinstance(said, Mapping) or not said:
            return None
        size = said.get("group_size")
        by_size = "tensor" if size is None else "channel" if size == -1 else "group"
        return cls(
            bits=said.get("num_bits", cls.bits),
            kind=said.get("type", cls.kind),
            strategy=by_size if said.get("strategy") is None else said["strategy"],
            group_size=size,
            symmetric=said.get("symmetric", cls.symmetric),
            dynamic=said.get("dynamic", cls.dynamic),
            block=said.get("block_structure"),
            order=said.get("actorder"),
        )

    def are(self, element: Element) -> bool:
        """Whether values become codes of this element."""
        return (self.bits, self.kind) == (element.bits, "int" if element.is_integer else "float")

    @property
    def are_fp8(self) -> bool:
        return self.are(E4M3)

    @property
    def are_int8(self) -> bool:
        return self.are(INT8)

    @property
    def are_fixed(self) -> bool:
        """Whether inputs have one fixed scale."""
        return not self.dynamic and self.strategy == "tensor"

    @property
    def are_by_token(self) -> bool:
        """Whether inputs have a scale for each token, which engines find."""
        return self.dynamic is True and self.strategy == "token"


@dataclass(frozen=True)
class ConfigGroup:
    """One of the `config_groups`: the names, patterns and classes of modules that it is for, what their weights and
    inputs become, None where they stay as they are, and how codes are laid out: its own `format` or the config's."""

    targets: tuple[str, ...]
    weights: TensorArguments | None
    inputs: TensorArguments | None
    layout: object

    @property
    def fixes_inputs(self) -> bool:
        """Whether inputs have a fixed scale, which may be a global one."""
        inputs = self.inputs
        return inputs is not None and inputs.dynamic is not True and inputs.strategy in ("tensor", "tensor_group")


def config_groups(config: Mapping[str, Any]) -> dict[str, ConfigGroup]:
    """The groups of a `quantization_config`, by their names; none where a stranger's config has something else."""
    found: dict[str, ConfigGroup] = {}
    for name, said in mapping_or_empty(config.get("config_groups")).items():
        group = mapping_or_empty(said)
        targets = listed if isinstance(listed := group.get("targets"), list | tuple) else ()
        found[name] = ConfigGroup(
            tuple(target for target in targets if isinstance(target, str)),
            TensorArguments.of(group.get("weights")),
            TensorArguments.of(group.get("input_activations")),
            group.get("format") or config.get("format"),
        )
    return found


def cache_arguments(config: Mapping[str, Any]) -> TensorArguments | None:
    """What a `quantization_config` says of the KV cache."""
    return TensorArguments.of(config.get("kv_cache_scheme"))


def read(config: Mapping[str, Any]) -> Quantization:
    """Reads what llm-compressor and others write too: several groups, blocks, weights alone, MXFP8, INT8.

    Raises PrecisionError for others.
    """
    parts = [(group.targets, read_group(group)) for group in config_groups(config).values()]
    cache = cache_arguments(config)
    if not (parts or cache):
        raise _unread("there are no groups")
    if _is_there(config.get("sparsity_config")) or _is_there(config.get("transform_config")):
        raise _unread("weights are packed as sparse, or were transformed")
    if cache and not cache.are_fp8:
        raise _unread("the KV cache is not in FP8")
    return combined(parts) if parts else OF_CACHE_ALONE


def read_group(group: ConfigGroup) -> Quantization:
    """What a group's weights and inputs are. Raises PrecisionError as `read`."""
    weights, inputs = group.weights, group.inputs
    if weights is not None and weights.bits == 4:
        return Quantization((_four_bits(weights, inputs, group.layout),), None)
    if weights is not None and weights.are_int8:
        return _int8(weights, inputs, group.layout)
    if weights is None or not weights.are_fp8:
        raise _unread("weights are neither of 4 bits nor of 8")
    if weights.symmetric is False or weights.dynamic:
        raise _unread("weights have zero points, or no scales")
    if weights.strategy == "block":
        block: Block = block_of(weights.block)
    elif weights.strategy == "group" and type(size := weights.group_size) is int and size > 0:
        block = (1, size)
    elif weights.strategy in ("tensor", "channel"):
        block = TENSOR if weights.strategy == "tensor" else CHANNEL
    else:
        raise _unread(f"strategy {shown(weights.strategy)}")
    found = in_fp8([block], inputs is not None and inputs.are_fixed, inputs=_inputs(inputs, (E4M3,)))
    is_mxfp8 = group.layout not in ("float-quantized", "naive-quantized")  # its layout has its name
    if block == SCHEMES["mxfp8"].block and not is_mxfp8:
        return replace(found, formats=tuple(replace(form, scales=FLOATS) for form in found.formats))
    return found


def _inputs(inputs: TensorArguments | None, known: Sequence[Element]) -> InputFormat | None:
    """What inputs become, of the formats that are `known` beside such weights; None where they stay as they are."""
    if inputs is None:
        return None
    for element in known:
        if inputs.are(element):
            return InputFormat(element, zero_point=element.is_integer and inputs.symmetric is not True)
    said = {"num_bits": inputs.bits, "type": inputs.kind, "strategy": inputs.strategy, "dynamic": inputs.dynamic}
    return InputFormat(None, ", ".join(f"{key} {shown(value)}" for key, value in said.items()))


def _four_bits(weights: TensorArguments, inputs: TensorArguments | None, layout: object) -> CodeFormat:
    kind, strategy, size = weights.kind, weights.strategy, weights.group_size
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
    by_token = inputs is None or inputs.are_by_token
    form = replace(_INT4, block=_block_of_integers(weights), inputs=_inputs(inputs, (E4M3,) if by_token else ()))
    return form if symmetric else replace(form, zero_points="weight_zero_point")


_IN_BYTES = ("int-quantized", "naive-quantized")
_LAYOUTS = {**dict.fromkeys(_IN_BYTES, (_INT8,)), "pack-quantized": (_INT8_PACKED,)}


def _int8(weights: TensorArguments, inputs: TensorArguments | None, layout: object) -> Quantization:
    """Bytes, or words of four; zero points are read beside words alone. Inputs are rounded to INT8 too, by one fixed
    scale or by one for each token, or stay as they are."""
    symmetric = _symmetric(weights)
    block = TENSOR if weights.strategy == "tensor" and symmetric else _block_of_integers(weights)
    known = _LAYOUTS.get(layout, (_INT8, _INT8_PACKED)) if isinstance(layout, str) else (_INT8, _INT8_PACKED)
    forms = [replace(form, block=block) for form in known]
    if not symmetric:
        forms = [replace(form, zero_points="weight_zero_point") for form in forms if form.shape]
    if not forms:
        raise _unread("8-bit weights have zero points that are not packed")
    if inputs is None:
        return Quantization(tuple(forms), None)
    fixed, by_token = inputs.are_fixed, inputs.are_by_token
    if not inputs.are_int8 or not (fixed or by_token):
        raise _unread("inputs of 8-bit integer weights are no 8-bit integers under one fixed scale, or one of a token")
    made = _inputs(inputs, (INT8,)) if by_token else None
    zero_point = None if by_token or inputs.symmetric is True else "input_zero_point"
    given = "input_scale" if fixed else None
    forms = [replace(form, input=given, input_zero_point=zero_point, inputs=made) for form in forms]
    return Quantization(tuple(forms), fixed)


def _symmetric(weights: TensorArguments) -> bool:
    """Whether weights have no zero points. Raises PrecisionError for those that have no scales."""
    if weights.dynamic or type(weights.symmetric) is not bool:
        raise _unread("weights have no scales")
    return weights.symmetric


def _block_of_integers(weights: TensorArguments) -> Block:
    """The groups or channels of integers. Raises PrecisionError for groups of inputs in another order."""
    strategy, size = weights.strategy, weights.group_size
    if weights.order in ("group", "dynamic"):
        raise _unread("groups are of inputs in another order (actorder)")
    groups = strategy == "group" and type(size) is int and 0 < size < 1 << 31
    if not (groups or strategy == "channel"):
        raise _unread(f"{weights.bits}-bit 'int' weights of strategy {shown(strategy)}, groups of {shown(size)}")
    return (1, size if type(size) is int and groups else None)


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
