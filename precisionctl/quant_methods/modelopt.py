"""NVIDIA ModelOpt's unified export (`weight_scale`, `input_scale`): scale_inv; `[]`, `[rows]`, a grid for blocks.

TensorRT-LLM's PyTorch backend, vLLM and SGLang read it. transformers does not: it skips the method with a warning
and takes the codes for weights. The JSON is that of ModelOpt 0.47, twice: flat in config.json, nested in
hf_quant_config.json.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from precisionctl.codes.elements import E2M1, Packing
from precisionctl.dtypes import DType
from precisionctl.errors import PrecisionError, shown
from precisionctl.quant_methods.base import (
    CHANNEL,
    MXFP4,
    OF_CACHE_ALONE,
    TENSOR,
    Block,
    CacheSpelling,
    CodeFormat,
    InputFormat,
    Quantization,
    QuantMethod,
    Scheme,
    Spelling,
    combined,
    in_fp8,
)
from precisionctl.quant_methods.caches import caches_in_fp8
from precisionctl.untrusted.safe_json import mapping_or_empty

_ALGORITHMS: Mapping[Scheme, str] = {
    "static": "FP8",
    "dynamic": "FP8_PER_CHANNEL_PER_TOKEN",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
}
_GROUPS: Mapping[Scheme, dict[str, int]] = {"mxfp8": {"group_size": 32}}
_NESTED_GROUPS = {"MXFP8": 32, "NVFP4": 16}
_FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}
_TENSORS: Mapping[Scheme, dict[str, Any]] = {"static": _FP8, "nvfp4": _FP8 | {"num_bits": 4, "group_size": 16}}
"""Of the schemes with config groups."""

# It names the format, not who wrote the files: readers look for this name before they read on.
_PRODUCER = {"name": "modelopt", "version": "0.47.0"}


def config(scheme: Scheme, ignored: Sequence[str]) -> dict[str, Any]:
    """Only schemes of fixed input scales have config groups, as ModelOpt writes it."""
    tensors = _TENSORS.get(scheme)
    group = {"input_activations": tensors, "weights": tensors, "targets": ["Linear"]}
    groups = {"config_groups": {"group_0": group}} if tensors else {}
    return groups | {
        "ignore": sorted(ignored),
        "quant_algo": _ALGORITHMS[scheme],
        "producer": _PRODUCER,
        "quant_method": "modelopt",
        **_GROUPS.get(scheme, {}),
    }


def files(config: Mapping[str, Any]) -> dict[str, bytes]:
    """The same, nested."""
    quantization = {
        "quant_algo": config["quant_algo"],
        "kv_cache_quant_algo": "FP8" if "kv_cache_scheme" in config else None,
        "exclude_modules": config["ignore"],
        **({"group_size": _NESTED_GROUPS[algorithm]} if (algorithm := config["quant_algo"]) in _NESTED_GROUPS else {}),
    }
    text = json.dumps({"producer": _PRODUCER, "quantization": quantization}, indent=4)
    return {"hf_quant_config.json": text.encode()}


def _shape(block: Block, grid: tuple[int, int]) -> tuple[int, ...]:
    """Of blocks of several rows it has four dimensions."""
    if block == TENSOR:
        return ()
    if block == CHANNEL:
        return grid[:1]
    return grid if block[0] == 1 else (grid[0], 1, grid[1], 1)


_NVFP4 = CodeFormat(
    (1, 16),
    Packing("NVFP4", E2M1, DType.uint8),
    (DType.float8_e4m3fn,),
    global_scale="weight_scale_2",
    input="input_scale",
)

_READ: Mapping[str, Quantization] = {
    "FP8": in_fp8([TENSOR], True),
    "FP8_PER_CHANNEL_PER_TOKEN": in_fp8([CHANNEL], False),
    "FP8_PB_WO": in_fp8([(128, 128)], False),
    "MXFP8": in_fp8([(1, 32)], False),
    "NVFP4": Quantization((_NVFP4,), None),
    "W4A16_NVFP4": Quantization((_NVFP4,), None),
    "MXFP4": Quantization((replace(MXFP4, inputs=InputFormat(E2M1)),), None),
    "W4A8_MXFP4_FP8": Quantization((replace(MXFP4, inputs=InputFormat(None, "W4A8_MXFP4_FP8")),), None),
}
"""`quant_algo`; some are spelled in lower case, `fp8_pb_wo` and `mxfp4` (modelopt/torch/export/quant_utils.py)."""

_OTHERWISE = {
    "AWQ": "inputs are scaled too (pre_quant_scale)",
    "W8A8_SQ": "inputs are scaled too (pre_quant_scale)",
    "SVD": "a part of low rank is to be added",
    "FOUR_OVER_SIX": "scales are normalised otherwise",
}
"""Why codes and scales of an algorithm with such a word in its name are not the weights."""


def read(config: Mapping[str, Any]) -> Quantization:
    """`MIXED_PRECISION` names the algorithm of each layer."""
    algorithms, named = [config.get("quant_algo")], [""]
    if algorithms == ["MIXED_PRECISION"]:
        layers = mapping_or_empty(config.get("quantized_layers"))
        algorithms = [layer.get("quant_algo") if isinstance(layer, Mapping) else None for layer in layers.values()]
        named = list(layers)
    if algorithms == [None] and caches_in_fp8(config):
        return OF_CACHE_ALONE
    parts = [_READ.get(name.upper()) if isinstance(name, str) else None for name in algorithms]
    if not parts or None in parts:
        unread = next((name for name, part in zip(algorithms, parts, strict=True) if part is None), None)
        why = next((f": {why}" for word, why in _OTHERWISE.items() if word in str(unread).upper()), "")
        raise PrecisionError(
            f"quant_algo {shown(unread)} cannot be read{why}",
            where="config.json",
            do=f"Known: {', '.join(_READ)}. Start from the unquantized model.",
        )
    return combined(([name], part) for name, part in zip(named, parts, strict=True) if part is not None)


QUANT_METHOD = QuantMethod(
    name="modelopt",
    read=read,
    spelling=Spelling(
        config=config,
        cache=CacheSpelling(("k_proj.k_scale", "v_proj.v_scale"), (), {"kv_cache_scheme": _FP8}),
        files=files,
        shape=_shape,
        ignored_by_part=True,
        four_bits={"nvfp4": _NVFP4},
    ),
)
