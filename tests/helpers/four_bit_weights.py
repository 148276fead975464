"""A four-bit weight as a tool has stored it, in the terms of our arithmetic."""

from collections.abc import Mapping

import torch
from torch import Tensor

from precisionctl.codes import nibbles, zero_points
from precisionctl.codes.elements import E2M1, INT4
from precisionctl.codes.encoding import GlobalScale


class FourBitWeight:
    """`stored`: a module's tensors under compressed-tensors' names, or those of ModelOpt, whose codes are `weight`."""

    def __init__(self, stored: Mapping[str, Tensor]) -> None:
        self.stored, self.modelopt = stored, "weight" in stored
        codes = stored["weight" if self.modelopt else "weight_packed"]
        self.element = INT4 if codes.dtype == torch.int32 else E2M1
        self.packed, self.scale = codes.view(torch.uint8), stored["weight_scale"]
        self.codes = nibbles.unpack(self.packed)
        self.whole = stored.get("weight_scale_2" if self.modelopt else "weight_global_scale")
        zeros = stored.get("weight_zero_point")
        self.zeros = None if zeros is None else zero_points.unpacked(zeros, len(codes), 4)
        if self.whole is not None:
            self.multipliers = GlobalScale(self.whole, divides=not self.modelopt).times(self.scale)
        else:
            exponents = self.scale.dtype == torch.uint8
            self.multipliers = (self.scale.view(torch.float8_e8m0fnu) if exponents else self.scale).float()

    def decoded(self) -> Tensor:
        """BF16."""
        values = torch.empty(self.codes.shape)
        scratch = torch.empty(nibbles.SCRATCH)
        nibbles.decode(self.packed, self.element, self.multipliers, values, scratch, self.zeros)
        return values.bfloat16()

    def encoded(self, values: Tensor) -> Tensor:
        """The codes of values under these scales."""
        packed = torch.empty_like(self.packed)
        nibbles.encode(values, self.element, self.multipliers, packed, torch.empty(nibbles.SCRATCH), self.zeros)
        return nibbles.unpack(packed)

    def by_element(self, grid: Tensor) -> Tensor:
        """What `[rows, groups]` has for each element."""
        return grid.repeat_interleave(self.codes.shape[1] // grid.shape[1], 1)
