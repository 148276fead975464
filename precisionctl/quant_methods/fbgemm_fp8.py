"""`quant_method: fbgemm_fp8` (`weight_scale`): scale_inv, FP32 `[rows, 1]`, one for each output channel.

The format that Meta released Llama 3.1 405B in (transformers' integrations/fbgemm_fp8.py). Inputs get a scale for each
token, whose amax is cut off at `activation_scale_ub`. It is read here, and written back with the old codes; no
export is made in it.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from precisionctl.errors import PrecisionError, shown
from precisionctl.quant_methods.base import CHANNEL, IN_FP8, Quantization, QuantMethod, in_fp8


def read(config: Mapping[str, Any]) -> Quantization:
    """Nothing but the bound, 1200 where there is none: there is one way."""
    bound = config.get("activation_scale_ub", 1200.0)
    if type(bound) not in (int, float) or not 0 < bound < math.inf:
        raise PrecisionError(f"activation_scale_ub is {shown(bound)}, not a positive number", where="config.json")
    return in_fp8([CHANNEL], False, inputs=replace(IN_FP8, bound=float(bound)))


QUANT_METHOD = QuantMethod(name="fbgemm_fp8", read=read)
