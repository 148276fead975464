"""Formats of groups as Transformer Engine writes them, read as we read files of them: Blackwell alone has the casts."""

import pytest
import torch
from torch import Tensor

from precisionctl.fp8 import group_scales, nibbles, numerics

try:
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex
except (ImportError, RuntimeError, OSError):  # conftest.py skips everything, with the reason
    te = tex = None

ROWS, COLUMNS = 256, 512


def values() -> Tensor:
    """With groups that are small, large, and zero."""
    sizes = torch.logspace(-6, 3, ROWS, device="cuda")[:, None]
    made = (torch.randn(ROWS, COLUMNS, device="cuda") * sizes).bfloat16()
    made[3, 32:64] = 0
    return made


def require(name: str) -> None:
    available, reason = getattr(te, f"is_{name}_available")(return_reason=True)
    if not available:
        pytest.skip(reason)


def test_mxfp8_codes_and_exponents_are_those_that_we_make() -> None:
    require("mxfp8")
    made = te.MXFP8Quantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=False)(given := values())
    groups = given.float().view(ROWS, -1, 32)
    scale = numerics.mx_scale(groups.abs().amax(-1), torch.float8_e4m3fn)
    codes = (groups * scale[..., None]).to(torch.float8_e4m3fn).view(torch.uint8).view(ROWS, COLUMNS)
    assert torch.equal(made._rowwise_data, codes)
    exponents = made._rowwise_scale_inv[:ROWS, : COLUMNS // 32]  # whose rows and columns are padded
    assert torch.equal(exponents.int(), 127 - scale.log2().int())


def test_nvfp4_codes_are_decoded_to_the_values_that_te_decodes_them_to() -> None:
    require("nvfp4")
    made = te.NVFP4Quantizer(rowwise=True, columnwise=False)(values())
    stored = made._rowwise_scale_inv[:ROWS, : COLUMNS // 16].contiguous().view(torch.float8_e4m3fn)
    whole = group_scales.nvfp4_global(made._amax_rowwise, divisor=False)
    scales = group_scales.nvfp4_multipliers(stored, whole, divisor=False)
    decoded, scratch = torch.empty(ROWS, COLUMNS, device="cuda"), torch.empty(nibbles.SCRATCH, device="cuda")
    nibbles.decode(made._rowwise_data.view(ROWS, -1), "E2M1", scales, decoded, scratch)
    torch.testing.assert_close(decoded, made.dequantize(dtype=torch.float32), rtol=2**-20, atol=0)
