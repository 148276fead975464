"""What a `quantization_config` says of a KV cache."""

from collections.abc import Mapping
from typing import Any

from precisionctl.quant_methods.compressed_tensors import cache_arguments


def caches_in_fp8(quantization: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` says that keys and values are cached in FP8."""
    if quantization.get("quant_method") == "quark":  # all else than FP8 is not read
        export = quantization.get("export")
        return isinstance(export, Mapping) and bool(export.get("kv_cache_group"))
    if cache := cache_arguments(quantization):
        return cache.are_fp8
    return quantization.get("kv_cache_quant_algo") == "FP8"
