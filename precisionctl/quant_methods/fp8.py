"""`quant_method: fp8` (`weight_scale_inv`, `weight_scale`, `activation_scale`, `input_scale`): scale_inv, all of them.

DeepSeek's format, one scale for 128 x 128 values, and that of whoever writes one for a tensor: transformers with a
`weight_scale_inv` of no dimension, vLLM's with `weight_scale`. Edges are ragged: 576 rows have 5 rows of scales. Under
`scale_fmt: ue8m0` scales are powers of two, stored in FP32 or as E8M0. DeepSeek-V4's experts are MXFP4 beside them, in
bytes with a sign.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from precisionctl.codes.elements import E2M1, Packing
from precisionctl.dtypes import DType
from precisionctl.errors import PrecisionError, shown
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.base import (
    EXPONENTS,
    SQUARE,
    TENSOR,
    CacheSpelling,
    CodeFormat,
    Quantization,
    QuantMethod,
    Scheme,
    Spelling,
    block_of,
    in_fp8,
)

_FP4 = CodeFormat((1, 32), Packing("MXFP4", E2M1, DType.int8), EXPONENTS)


def config(scheme: Scheme, ignored: Sequence[str]) -> dict[str, Any]:
    """DeepSeek's four keys, and the modules left out: by full names, since engines match them in four ways."""
    assert scheme == "block", "with one scale for a tensor, no two engines read the same names"
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": list(SQUARE),
        "modules_to_not_convert": list(ignored),
    }


def read(config: Mapping[str, Any]) -> Quantization:
    """`weight_block_size` null is one scale for a tensor. Where it is absent, that is so for vLLM, and 128 x 128 for
    transformers: the shapes tell."""
    scheme = config.get("activation_scheme", "dynamic")
    if scheme not in ("static", "dynamic"):
        raise PrecisionError(f"activation_scheme {shown(scheme)} cannot be read", where="config.json")
    size = config.get("weight_block_size", [128, 128])
    blocks = (TENSOR,) if size is None else (block_of(size),)
    found = in_fp8((TENSOR, *blocks) if "weight_block_size" not in config else blocks, scheme == "static")
    return replace(found, formats=(*found.formats, _FP4))


def expert_dtype(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    """The key `expert_dtype` that a config.json of DeepSeek-V4 has beside its `quantization_config`: whether experts
    are MXFP4 or blocks of FP8. transformers and vLLM believe it, and vLLM takes a missing one for MXFP4.

    vLLM models/deepseek_v4/quant_config.py; transformers 5.24 models/deepseek_v4/configuration_deepseek_v4.py.
    """
    if config.get("model_type") != "deepseek_v4" or config["quantization_config"].get("quant_method") != "fp8":
        return {}
    return {"expert_dtype": "fp4" if any(spec.packing for spec in specs.values()) else "fp8"}


QUANT_METHOD = QuantMethod(
    name="fp8",
    read=read,
    weight_scales=("weight_scale_inv", "weight_scale", "scale"),
    input_scales=("activation_scale", "input_scale"),
    spelling=Spelling(
        config=config,
        # ModelOpt's, which vLLM and SGLang read here too; the key is SGLang's, others are told when they start.
        cache=CacheSpelling(("k_proj.k_scale", "v_proj.v_scale"), (), {"kv_cache_quant_algo": "FP8"}),
        shape=lambda block, grid: () if block == TENSOR else grid,
        # DeepSeek's own directories name none of these.
        never=(
            *("lm_head", "shared_head.head", ".gate", "eh_proj"),
            *("head", "compressor.wkv", "compressor.wgate", "indexer.weights_proj"),  # V4
        ),
    ),
)
