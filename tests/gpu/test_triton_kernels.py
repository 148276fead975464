"""Triton's kernels on a GPU; `tests/peers/test_triton.py` has them interpreted."""

import torch
from te_pairs import sqnr

from precisionctl.trainer.model.kernels import kernels_for


def test_kernels_compute_what_pytorch_does_and_rope_every_bit() -> None:
    """An exponential's last bit may round the other way."""
    if torch.cuda.get_device_name() == "a CPU that stands in":
        return  # it has no Triton, and computes by PyTorch
    assert kernels_for(torch.ones(1, device="cuda")), (
        "PyTorch for CUDA comes with Triton, and this machine has a compiler"
    )
    from kernel_pairs import pairs

    for dtype in (torch.float32, torch.bfloat16):
        for name, kernel, expected in pairs("cuda", dtype):
            assert kernel.dtype == expected.dtype
            if name.startswith("rope"):
                assert torch.equal(kernel, expected), name
            else:
                assert sqnr(expected, kernel) > (120 if dtype == torch.float32 else 70), name
