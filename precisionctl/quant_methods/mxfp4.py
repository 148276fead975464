"""`quant_method: mxfp4` (`experts.gate_up_proj_blocks`, `..._scales`): exponents of two as bytes, for 32 values each.

The format that gpt-oss was released in, and that transformers, vLLM and SGLang read; of experts alone. It is read here,
not written.
"""

from collections.abc import Mapping
from typing import Any

from precisionctl.codes.elements import E2M1, Packing
from precisionctl.dtypes import DType
from precisionctl.quant_methods.base import CodeFormat, Quantization, QuantMethod

BLOCKS_OF_16 = Packing("MXFP4", E2M1, DType.uint8, block=16)
_MXFP4 = CodeFormat((1, 32), BLOCKS_OF_16, (DType.uint8,))


def read(config: Mapping[str, Any]) -> Quantization:
    """Nothing: there is one way. `modules_to_not_convert` names what has no blocks anyway."""
    return Quantization((_MXFP4,), None)


QUANT_METHOD = QuantMethod(name="mxfp4", read=read, weight_scales=("scales",), own_names=True)
