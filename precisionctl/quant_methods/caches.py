"""What a directory says of its KV cache: in a `quantization_config`, and by scales of keys and values."""

import re
from bisect import bisect
from collections.abc import Mapping
from typing import Any

from precisionctl.param import TensorSpec
from precisionctl.quant_methods.compressed_tensors import cache_arguments


def caches_in_fp8(quantization: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` says that keys and values are cached in FP8."""
    if quantization.get("quant_method") == "quark":  # all else than FP8 is not read
        export = quantization.get("export")
        return isinstance(export, Mapping) and bool(export.get("kv_cache_group"))
    if cache := cache_arguments(quantization):
        return cache.are_fp8
    return quantization.get("kv_cache_quant_algo") == "FP8"


CACHE_SCALES = (
    *(".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale"),
    *(".k_proj.output_scale", ".v_proj.output_scale", ".q_proj.output_scale", ".prob_output_scale"),  # the older ones
)
_INSIDE_ATTENTION = ("_proj", ".attn", ".mla_attn")
_NAMED_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)


def cache_scales(quantization: object, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The tensors that hold scales for a KV cache (or for attention), which belong to no weight: scale_inv. None
    without a `quantization_config`. Only those of an attention that has other tensors, too: one of a layer that is not
    there, or of an MLP, is a tensor like any other."""
    named = {name: spec for name, spec in specs.items() if name.endswith(CACHE_SCALES)}
    if not (named and quantization):
        return {}
    others = sorted(name for name in specs if name not in named)

    def is_there(module: str) -> bool:
        at = bisect(others, f"{module}.")
        return at < len(others) and others[at].startswith(f"{module}.")

    found: dict[str, TensorSpec] = {}
    for name, spec in named.items():
        module = name.rpartition(".")[0]
        while module.endswith(_INSIDE_ATTENTION):  # named for a projection, or for engines' inner module
            module = module.rpartition(".")[0]
        above = len(module.rpartition(".")[0])
        is_attention = _NAMED_ATTENTION.search(name, above) or is_there(f"{module}.k_proj")  # a hybrid's mixers have it
        if is_attention and is_there(module):
            found[name] = spec
    return found
