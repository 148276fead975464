"""What Transformer Engine's reference of NVFP4 has made (golden/nvfp4.py)."""

import repository
import torch
from safetensors.torch import load_file
from torch import Tensor

GOLDEN = load_file(repository.GOLDEN / "nvfp4.safetensors")
NAMES = sorted(name.removesuffix(".rows.codes") for name in GOLDEN if name.endswith(".rows.codes"))
_NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def unpacked(codes: Tensor) -> Tensor:
    """The numbers of E2M1 codes, two in a byte, the first in its low half."""
    each = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    return torch.where(each < 8, 1.0, -1.0) * _NUMBERS[(each & 7).long()]
