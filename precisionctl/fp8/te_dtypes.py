"""The numbers by which Transformer Engine's DType pickles, in its FP8 tensors: 2.4 counts other types before them.

common/include/transformer_engine/transformer_engine.h, NVTEDType: 0.2 to 2.3 (Float8Tensor came with 1.3) and from 2.4.
"""

from collections.abc import Mapping

import torch

TO_2_3: Mapping[int, torch.dtype] = {
    0: torch.uint8,
    1: torch.int32,
    2: torch.int64,
    3: torch.float32,
    4: torch.float16,
    5: torch.bfloat16,
    6: torch.float8_e4m3fn,
    7: torch.float8_e5m2,
}
SINCE_2_4: Mapping[int, torch.dtype] = {
    0: torch.uint8,
    1: torch.int16,
    2: torch.int32,
    3: torch.int64,
    4: torch.float32,
    5: torch.float16,
    6: torch.bfloat16,
    7: torch.float8_e4m3fn,
    8: torch.float8_e5m2,
}


def of_weight(number: int) -> torch.dtype | None:
    """The type of an FP8 weight's codes. Weights are E4M3 under every recipe of TE's that has per-tensor scales: a 6 is
    of the old count, and a 7 of the new one. None for any other number: it is not known of which count it is."""
    return torch.float8_e4m3fn if number in (6, 7) else None
