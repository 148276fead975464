"""DType's numbers, against the two headers of Transformer Engine that count differently."""

import torch

from precisionctl.fp8.te_dtypes import SINCE_2_4, TO_2_3, of_weight

HEADER_2_3 = "Byte Int32 Int64 Float32 Float16 BFloat16 Float8E4M3 Float8E5M2"
HEADER_2_4 = "Byte Int16 Int32 Int64 Float32 Float16 BFloat16 Float8E4M3 Float8E5M2"
"""kNVTE... in their order from 0, of release_v2.3 and release_v2.4; what comes after has no PyTorch type here."""

TYPES = {
    "Byte": torch.uint8,
    "Int16": torch.int16,
    "Int32": torch.int32,
    "Int64": torch.int64,
    "Float32": torch.float32,
    "Float16": torch.float16,
    "BFloat16": torch.bfloat16,
    "Float8E4M3": torch.float8_e4m3fn,
    "Float8E5M2": torch.float8_e5m2,
}


def test_both_counts_are_the_headers():
    assert {number: TYPES[name] for number, name in enumerate(HEADER_2_3.split())} == TO_2_3
    assert {number: TYPES[name] for number, name in enumerate(HEADER_2_4.split())} == SINCE_2_4


def test_a_weight_is_e4m3_in_either_count_and_a_number_of_neither_is_unknown():
    for count in (TO_2_3, SINCE_2_4):
        for number, dtype in count.items():
            if dtype == torch.float8_e4m3fn:
                assert of_weight(number) == dtype
    assert of_weight(8) is None and of_weight(5) is None
