"""The `quantization_config` of Quark 0.13, as its QConfig.to_dict and its exporter make it."""

from collections.abc import Mapping
from typing import Any

_TENSOR: Mapping[str, Any] = {
    "block_size": None,
    "ch_axis": None,
    "group_size": None,
    "is_dynamic": False,
    "is_scale_quant": False,
    "mx_element_dtype": None,
    "round_method": "half_even",
    "scale_calculation_mode": None,
    "scale_format": None,
    "scale_type": "float",
    "symmetric": True,
    "zero_point_type": "int32",
}
FP8 = {**_TENSOR, "dtype": "fp8_e4m3", "qscheme": "per_tensor", "observer_cls": "PerTensorMinMaxObserver"}
CHANNELS = {**FP8, "qscheme": "per_channel", "ch_axis": 0, "observer_cls": "PerChannelMinMaxObserver"}
TOKENS = {**CHANNELS, "ch_axis": 1, "is_dynamic": True}
MXFP4 = {
    **_TENSOR,
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": 32,
    "ch_axis": -1,
    "scale_format": "e8m0",
    "scale_calculation_mode": "even",
    "symmetric": None,
    "observer_cls": "PerBlockMXObserver",
}
MXFP4_INPUTS = {**MXFP4, "is_dynamic": True}


def layer(weight: object, inputs: object, outputs: object = None) -> dict[str, Any]:
    return {"weight": weight, "input_tensors": inputs, "output_tensors": outputs, "bias": None, "target_device": None}


def config(weight: object, inputs: object, layers: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """`layers` are those with settings of their own, by patterns of their names; `more` are other keys."""
    export = {"kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder", "weight_format": "real_quantized"}
    return {
        "quant_method": "quark",
        "global_quant_config": layer(weight, inputs),
        "layer_quant_config": dict(layers or {}),
        "layer_type_quant_config": {},
        "kv_cache_quant_config": {},
        "kv_cache_post_rope": False,
        "exclude": ["lm_head"],
        "algo_config": None,
        "softmax_quant_spec": None,
        "quant_mode": "eager_mode",
        "export": {**export, "weight_merge_groups": None},
        "version": "0.13",
        **more,
    }
