"""`quant_method: mxfp8` (`weight_scale_inv`): exponents of two as bytes, for 32 values of a row each; 2^(byte - 127).

The format of SGLang, of those that refit its models (miles, NeMo-RL), of MiniMax, which names only what is left out,
and of Inkling 2 Small, whose experts have `weight_scale`. TensorRT-LLM and transformers (5.24, experts too) read it;
vLLM looks for `weight_scale`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from precisionctl.quant_methods.base import (
    POWERS_OF_2,
    SCHEMES,
    CacheSpelling,
    Quantization,
    QuantMethod,
    Scheme,
    Spelling,
    in_fp8,
)


def config(scheme: Scheme, ignored: Sequence[str]) -> dict[str, Any]:
    """All keys that some reader needs. `ignored_layers` is MiniMax's word, which each of them knows."""
    assert scheme == "mxfp8", "the method has no other"
    return {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": list(SCHEMES["mxfp8"].block),
        **POWERS_OF_2,
        "ignored_layers": list(ignored),
    }


def read(config: Mapping[str, Any]) -> Quantization:
    """Groups of 32, whatever `weight_block_size` is: readers go by the standard, and so do the shapes of scales."""
    return in_fp8([SCHEMES["mxfp8"].block], False)


QUANT_METHOD = QuantMethod(
    name="mxfp8",
    read=read,
    weight_scales=("weight_scale_inv", "weight_scale"),
    spelling=Spelling(
        config=config,
        # As beside `quant_method: fp8`, whose class reads this one too in SGLang.
        cache=CacheSpelling(("k_proj.k_scale", "v_proj.v_scale"), (), {"kv_cache_quant_algo": "FP8"}),
        never=("lm_head", ".gate"),  # no reader takes codes for these, listed or not
    ),
)
