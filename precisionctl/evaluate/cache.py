"""Keys and values as an FP8 KV cache returns them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from precisionctl.codes import numerics
from precisionctl.export.kv_cache import CacheScale
from precisionctl.quant_methods.base import CODES


def round_cached(attention: nn.Module, scale: CacheScale) -> None:
    """Register a hook that rounds the keys and values `[B, S, G, D]` of an attention as an FP8 cache does: divided by
    their scale in FP32, saturated, rounded to E4M3, and multiplied again, in FP32 too (vLLM's
    csrc/cache_kernels.cu, fp8::scaled_convert)."""
    attention.register_forward_pre_hook(partial(_round_arguments, scale))


def _round_arguments(scale: CacheScale, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    query, key, value, *rest = arguments
    return query, _rounded(key, scale.k), _rounded(value, scale.v), *rest


def _rounded(values: Tensor, scale_inv: float) -> Tensor:
    divisor = torch.tensor(scale_inv, device=values.device)
    rows = values.reshape(-1, values.shape[-1])
    codes = torch.empty(rows.shape, dtype=CODES.torch, device=values.device)
    numerics.encode_by_scale_inv(rows, divisor, codes, numerics.scratch_for(rows))
    return numerics.decode(codes, divisor).to(values.dtype).view(values.shape)
