"""Keys and values as a cache in FP8 gives them back."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from precisionctl.export.kv_cache import CacheScale
from precisionctl.fp8 import numerics
from precisionctl.quant_methods.base import CODES


def round_cached(attention: nn.Module, scale: CacheScale) -> None:
    """Let an attention see keys and values `[B, S, G, D]` that have been in a cache: divided by their scale in FP32,
    saturated, rounded to E4M3, and multiplied again (vLLM's csrc/cache_kernels.cu, fp8::scaled_convert)."""
    attention.register_forward_pre_hook(partial(_through, scale))


def _through(scale: CacheScale, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    query, key, value, *rest = arguments
    return query, _rounded(key, scale.k), _rounded(value, scale.v), *rest


def _rounded(values: Tensor, scale_inv: float) -> Tensor:
    by = torch.tensor(scale_inv, device=values.device)
    rows = values.reshape(-1, values.shape[-1])
    codes = torch.empty(rows.shape, dtype=CODES, device=values.device)
    numerics.encode_by_scale_inv(rows, by, codes, numerics.scratch_for(rows))
    return numerics.decode(codes, by, values.dtype).view(values.shape)
