"""Formats of groups as Transformer Engine writes them, read as we read files of them. Blackwell alone has the casts;
TE's Python has its own reference for NVFP4's."""

import pytest
import torch
from torch import Tensor

from precisionctl.codes import group_scales, nibbles, numerics, nvfp4_scaling
from precisionctl.codes.elements import E2M1
from precisionctl.codes.encoding import GlobalScale

try:
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef, cast_from_fp4x2
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats
except (ImportError, RuntimeError, OSError):  # conftest.py skips everything, with the reason
    te = tex = NVFP4QuantizerRef = cast_from_fp4x2 = Fp4Formats = None

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


def decoded(codes: Tensor, scale_inv: Tensor, amax: Tensor) -> Tensor:
    """Values of NVFP4, FP32, as those of a file are decoded."""
    whole = group_scales.nvfp4_global(amax, divisor=False)
    scales = GlobalScale(whole, divides=False).times(scale_inv.view(torch.float8_e4m3fn))
    made, scratch = torch.empty(ROWS, COLUMNS, device="cuda"), torch.empty(nibbles.SCRATCH, device="cuda")
    nibbles.decode(codes.view(ROWS, -1), E2M1, scales, made, scratch)
    return made


def test_nvfp4_codes_of_te_s_reference_are_decoded_to_the_values_that_it_gives_them() -> None:
    """On any GPU: it is plain PyTorch."""
    quantizer = NVFP4QuantizerRef(Fp4Formats.E2M1, columnwise=False)
    made = quantizer.quantize(given := values())
    scales = made.scale.float() * (made.global_amax_row / (6 * 448))
    expected = cast_from_fp4x2(made.data, torch.float32) * scales.repeat_interleave(16, 1)
    found = decoded(made.data, made.scale, made.global_amax_row)
    torch.testing.assert_close(found, expected, rtol=2**-20, atol=0)
    assert (found - given.float()).norm() < 0.15 * given.float().norm()


def test_nvfp4_codes_of_te_s_kernel_are_decoded_to_the_values_that_te_decodes_them_to() -> None:
    require("nvfp4")
    made = te.NVFP4Quantizer(rowwise=True, columnwise=False)(values())
    scale_inv = made._rowwise_scale_inv[:ROWS, : COLUMNS // 16].contiguous()
    found = decoded(made._rowwise_data, scale_inv, made._amax_rowwise)
    torch.testing.assert_close(found, made.dequantize(dtype=torch.float32), rtol=2**-20, atol=0)


@pytest.mark.parametrize("of", ["weight", "input"])
def test_nvfp4_codes_and_scales_of_te_s_kernels_are_those_that_training_makes(of: str) -> None:
    """Both copies; of an input the one along the columns is of transformed values."""
    require("nvfp4")
    block, given = (16, 16) if of == "weight" else (1, 16), values()
    rht = of == "input"
    made = te.NVFP4Quantizer(with_rht=rht, with_post_rht_amax=rht, with_2d_quantization=not rht)(given)
    columns = nvfp4_scaling.transformed(given.t()) if rht else given.t()
    for shown, codes, scale_inv, amax in (
        (given, made._rowwise_data, made._rowwise_scale_inv, made._amax_rowwise),
        (columns, made._columnwise_data, made._columnwise_scale_inv, made._amax_columnwise),
    ):
        rows, width = shown.shape
        ours, ours_inv, ours_amax = nvfp4_scaling.quantize(shown, block)
        assert amax == ours_amax
        stored = scale_inv.view(torch.float8_e4m3fn)[:rows, : width // 16].float()  # whose rows and columns are padded
        assert torch.equal(stored, ours_inv.float().repeat_interleave(block[0], 0))
        assert torch.equal(cast_from_fp4x2(codes.view(torch.uint8).view(rows, -1), torch.float32), ours.float())
