"""`quant_method: mxfp4` (`experts.gate_up_proj_blocks`, `..._scales`): exponents of two as bytes, for 32 values each.

The format that gpt-oss was released in, and that transformers, vLLM and SGLang read; of experts alone. It is read here,
not written.
"""

from collections.abc import Mapping
from typing import Any

from precisionctl.quant_methods.base import Quantization, QuantMethod


def read(config: Mapping[str, Any]) -> Quantization:
    """Nothing: there is one way. `modules_to_not_convert` names what has no blocks anyway."""
    return Quantization(((1, 32),), False)


QUANT_METHOD = QuantMethod(name="mxfp4", read=read, weight_scales=("scales",))
