"""DType: what a tensor's elements are stored as, known without PyTorch.

Importing torch takes 1.6 s of CPU and 200 MB. Headers, plans, reports and copies of bytes do without: they have DTypes,
and tensors have torch's. The two meet in `DType.torch` and `DType.of` alone.
"""

from __future__ import annotations

import builtins
from enum import Enum
from functools import cached_property

from precisionctl.torch_when_used import torch


class DType(Enum):
    """A dtype under PyTorch's name for it."""

    float64 = "float64"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float8_e4m3fn = "float8_e4m3fn"
    float8_e5m2 = "float8_e5m2"
    float8_e4m3fnuz = "float8_e4m3fnuz"
    float8_e5m2fnuz = "float8_e5m2fnuz"
    float8_e8m0fnu = "float8_e8m0fnu"
    int64 = "int64"
    int32 = "int32"
    int16 = "int16"
    int8 = "int8"
    uint64 = "uint64"
    uint32 = "uint32"
    uint16 = "uint16"
    uint8 = "uint8"
    bool = "bool"
    complex128 = "complex128"
    complex64 = "complex64"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def of(cls, dtype: torch.dtype) -> DType:
        """The same of a tensor's. Raises ValueError for one that no checkpoint has (quantized, or of four bits)."""
        return cls(str(dtype).removeprefix("torch."))

    def promoted(self, other: DType) -> DType:
        """The dtype that both are promoted to, by PyTorch's rule."""
        return self if self is other else DType.of(torch.promote_types(self.torch, other.torch))

    @cached_property
    def torch(self) -> torch.dtype:
        """PyTorch's own."""
        found = getattr(torch, self.value)
        assert isinstance(found, torch.dtype)
        return found

    @cached_property
    def itemsize(self) -> int:
        """Bytes of an element."""
        bits = "".join(filter(str.isdigit, self.value.partition("_")[0]))
        return int(bits) // 8 if bits else 1

    @property
    def is_floating_point(self) -> builtins.bool:
        """Whether it is a floating-point dtype."""
        return self.value.startswith(("float", "bfloat"))
