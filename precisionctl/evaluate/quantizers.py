"""The operands of an inference engine's GEMM: the stored weights unchanged, inputs cast as the engine's kernels do it.

These are Quantizers, as trainer/backends/fp8_gemm.py defines them: each returns codes, or the values that they decode
to, and the multiplier that decodes them.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from precisionctl.codes import nibbles, numerics
from precisionctl.codes.elements import E2M1, E4M3
from precisionctl.codes.encoding import Encoding
from precisionctl.codes.group_scales import MXFP4_GROUP, NVFP4_GROUP, mxfp4_scales
from precisionctl.param import gemm_misfit
from precisionctl.quant_methods.base import CODES
from precisionctl.trainer.backends.fp8_gemm import NativeBlocks, NativeOperand, Operand, Quantized


@dataclass(frozen=True)
class StoredBlocks:
    """A weight with block scales, decoded: FP32 `[out, in]`. Engines' kernels apply block scales within the sum, in
    FP32, so a GEMM of decoded values in FP32 equals theirs up to the order of FP32 roundings."""

    values: Tensor

    def quantize(self, values: Tensor) -> Quantized:
        return Quantized(Operand(self.values, self.values.new_ones(())))


@dataclass(frozen=True)
class NativeStoredBlocks:
    """A weight in blocks of 128 x 128 for the GPU's block-scaled GEMM: codes `[out, in]`, and `scale_inv` as in
    `NativeBlocks`. Its inputs must be `GroupInputs` with `native`."""

    codes: Tensor
    scale_inv: Tensor

    def quantize(self, values: Tensor) -> Quantized:
        return Quantized(NativeBlocks(self.codes, self.scale_inv))


def has_block_gemms(device: torch.device) -> bool:
    """Whether PyTorch has block-scaled FP8 GEMMs on this device: on Hopper, with cuBLASLt of CUDA 12.9 or newer
    (ScaledBlas.cpp, _check_deepseek_support)."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    cuda = tuple(int(part) for part in torch.version.cuda.split("."))
    return torch.cuda.get_device_capability(device) == (9, 0) and cuda >= (12, 9)


@dataclass(frozen=True)
class StoredWeight:
    """A weight that is stored as codes `[out, in]`; `scale_inv` is FP32 `[out, 1]`. Uses the GPU's FP8 GEMM where it
    has one that takes its sizes."""

    codes: Tensor
    scale_inv: Tensor

    def quantize(self, values: Tensor) -> Quantized:
        native = _has_fp8_gemms(self.codes.device) and gemm_misfit(self.codes.shape) is None
        return Quantized((NativeOperand if native else Operand)(self.codes, self.scale_inv))


def _has_fp8_gemms(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@dataclass(frozen=True)
class StaticInputs:
    """Inputs under one fixed scale_inv, FP32 `[]`, multiplied by its reciprocal as vLLM does
    (csrc/quantization/w8a8/fp8/common.cu, static_scaled_fp8_quant)."""

    scale_inv: Tensor
    words = "static"

    def quantize(self, values: Tensor) -> Quantized:
        return Quantized(Operand(numerics.encode(values, self.scale_inv.reciprocal(), CODES.torch), self.scale_inv))


SMALLEST_TOKEN_SCALE = 1 / (448 * 512)
"""vLLM's floor for a token's scale_inv (csrc/quantization/utils.cuh, min_scaling_factor)."""


@dataclass(frozen=True)
class TokenInputs:
    """Inputs `[tokens, in]` with a scale_inv for each token, its amax / 448, divided by it as vLLM does
    (dynamic_per_token_scaled_fp8_quant). A larger amax than `bound` is taken for that, and values beyond are cut off,
    as there and in FBGEMM's quantize_fp8_per_row (`scale_ub`)."""

    bound: float = math.inf
    words = "dynamic per-token"

    def quantize(self, values: Tensor) -> Quantized:
        amax = values.abs().amax(1, keepdim=True).float().clamp_max(self.bound)
        scale_inv = (amax / E4M3.largest).clamp_min(SMALLEST_TOKEN_SCALE)
        codes = torch.empty(values.shape, dtype=CODES.torch, device=values.device)
        numerics.encode_by_scale_inv(values, scale_inv, codes, numerics.scratch_for(values))
        return Quantized(Operand(codes, scale_inv))


SMALLEST_GROUP_AMAX = 1e-10
"""vLLM's and SGLang's floor for the amax of a group (per_token_group_quant_fp8, eps)."""


@dataclass(frozen=True)
class GroupInputs:
    """Inputs `[tokens, in]` with a scale_inv for every `size` values of a token, their amax / 448, divided by it as
    vLLM's and SGLang's kernels do (per_token_group_quant_fp8); with `power_of_2`, by the next power of two, as for
    weights with such scales. The last group may be shorter. With `native`, codes are returned, for a
    `NativeStoredBlocks` weight; otherwise decoded values."""

    size: int
    power_of_2: bool = False
    native: bool = False

    @classmethod
    def like(cls, weight: Encoding) -> "GroupInputs":
        """The groups in which an engine quantizes the inputs of a weight with this encoding."""
        return cls(weight.block[1], weight.scale_inv.dtype.itemsize == 1)

    @property
    def words(self) -> str:
        return f"dynamic per-{self.size}"

    def quantize(self, values: Tensor) -> Quantized:
        tokens, columns = values.shape
        groups = torch.nn.functional.pad(values.float(), (0, -columns % self.size)).view(-1, self.size)
        amax = groups.abs().amax(1, keepdim=True).clamp_min(SMALLEST_GROUP_AMAX)
        scale_inv = amax / E4M3.largest
        if self.power_of_2:
            scale_inv = numerics.power_of_2_above(scale_inv)
        codes = torch.empty(groups.shape, dtype=CODES.torch, device=values.device)
        numerics.encode_by_scale_inv(groups, scale_inv, codes, numerics.scratch_for(groups))
        if self.native:
            return Quantized(Operand(codes.view(tokens, -1), scale_inv.view(tokens, -1)))
        decoded = numerics.decode(codes, scale_inv).view(tokens, -1)[:, :columns]
        return Quantized(Operand(decoded, decoded.new_ones(())))


@dataclass(frozen=True)
class Nvfp4Inputs:
    """Inputs `[tokens, in]` in NVFP4 under a fixed global scale, FP32 `[]`, a `divisor`: 2688 over the amax that it was
    made from. A group of 16 has its amax / 6 times that, rounded to E4M3; values are multiplied by the reciprocal of
    what codes are then worth, as vLLM's kernel does it (csrc/quantization/fp4/nvfp4_utils.cuh, cvt_warp_fp16_to_fp4).
    """

    divisor: Tensor
    words = "static global"

    def quantize(self, values: Tensor) -> Quantized:
        groups = values.float().reshape(-1, NVFP4_GROUP)
        wanted = self.divisor * (groups.abs().amax(1, keepdim=True) * (1 / E2M1.largest))
        scales = wanted.clamp(max=E4M3.largest).to(torch.float8_e4m3fn).float()
        quotients = groups * (scales / self.divisor).reciprocal()
        numbers = torch.where(scales > 0, _as_e2m1(quotients), 0.0)
        return Quantized(Operand((numbers * scales).view(values.shape), self.divisor.reciprocal()))


@dataclass(frozen=True)
class Mxfp4Inputs:
    """Inputs `[tokens, in]` in MXFP4: for 32 of a token the power of two above amax / 6, as FlashInfer's kernel rounds
    it, with which vLLM computes on Blackwell (mxfp4_quantize); elsewhere inputs stay in BF16. Or `even`, the scales
    that weights get: those of Quark's layers, and of vLLM, which calls Quark's kernel for its directories on GPUs
    without MXFP4 (quant_dequant_mxfp4)."""

    even: bool = False
    words = "dynamic per-32"

    def quantize(self, values: Tensor) -> Quantized:
        groups = values.float().reshape(-1, MXFP4_GROUP)
        amax = groups.abs().amax(1, keepdim=True)
        scales = mxfp4_scales(amax).float() if self.even else numerics.power_of_2_above(amax * (1 / E2M1.largest))
        decoded = _as_e2m1(groups / scales).mul_(scales).view(values.shape)
        return Quantized(Operand(decoded, decoded.new_ones(())))


@dataclass(frozen=True)
class StoredIntegers:
    """A weight in INT8: its numbers, FP32 `[out, in]`, and `scale_inv`, FP32 `[out, 1]`. Engines sum their products in
    INT32; these are FP32 sums of the same numbers."""

    numbers: Tensor
    scale_inv: Tensor

    def quantize(self, values: Tensor) -> Quantized:
        return Quantized(Operand(self.numbers, self.scale_inv))


@dataclass(frozen=True)
class Int8Inputs:
    """Inputs in INT8 under one fixed scale, FP32 `[]`: divided by it, or, with a `zero` point, FP32 `[]`, multiplied by
    its reciprocal and rounded before the zero point is added, as vLLM's kernels do
    (csrc/quantization/w8a8/int8/scaled_quant.cu, static_scaled_int8_quant)."""

    scale_inv: Tensor
    zero: Tensor | None = None
    words = "static"

    @classmethod
    def of_range(cls, lowest: Tensor, highest: Tensor) -> "Int8Inputs":
        """With a zero point, for the range of inputs that several linears share, FP32 `[]`, as vLLM makes it when it
        loads them (kernels/linear/scaled_mm, process_weights_after_loading)."""
        scale = (highest - lowest) / 255
        return cls(scale, (-128 - lowest / scale).trunc())

    def quantize(self, values: Tensor) -> Quantized:
        if self.zero is None:
            numbers = (values.float() / self.scale_inv).round_().clamp_(-128, 127)
        else:
            numbers = _less(self.zero, (values.float() * self.scale_inv.reciprocal()).round_())
        return Quantized(Operand(numbers, self.scale_inv))


@dataclass(frozen=True)
class Int8TokenInputs:
    """Inputs `[tokens, in]` in INT8 with a scale for each token: multiplied by 127 / amax or, with a `zero_point`, by
    the reciprocal of a 255th of the token's range, as vLLM's kernels do (dynamic_scaled_int8_quant)."""

    zero_point: bool
    words = "dynamic per-token"

    def quantize(self, values: Tensor) -> Quantized:
        values = values.float()
        if self.zero_point:
            lowest, highest = values.aminmax(dim=1, keepdim=True)
            scale = (highest - lowest) / 255
            there = scale > 0
            used = torch.where(there, scale, 1.0)
            zero = torch.where(there, (-128 - lowest / used).round_(), 0.0)
            return Quantized(Operand(_less(zero, (values * used.reciprocal()).round_()), scale))
        amax = values.abs().amax(1, keepdim=True)
        factor = torch.where(amax > 0, torch.full_like(amax, 127) / amax, 0.0)
        return Quantized(Operand((values * factor).round_().clamp_(-128, 127), amax / 127))


def _less(zero: Tensor, numbers: Tensor) -> Tensor:
    """What integers are worth once the zero point has been added, they have been cut to eight bits, and it has been
    taken away again."""
    return numbers.add_(zero).clamp_(-128, 127).sub_(zero)


InputQuantizer = StaticInputs | TokenInputs | GroupInputs | Nvfp4Inputs | Mxfp4Inputs | Int8Inputs | Int8TokenInputs


def _as_e2m1(values: Tensor) -> Tensor:
    """The nearest numbers of E2M1, FP32 `[groups, size]`; of two the even one."""
    packed = torch.empty(len(values), values.shape[1] // 2, dtype=torch.uint8, device=values.device)
    ones, scratch = values.new_ones(1, 1).expand(len(values), 1), values.new_empty(nibbles.SCRATCH)
    nibbles.encode(values, E2M1, ones, packed, scratch)
    numbers = torch.empty_like(values)
    nibbles.decode(packed, E2M1, ones, numbers, scratch)
    return numbers
