"""What FP8 would do to a tensor: how many elements underflow and saturate, and the rounding error, for each scaling.

The terms are those of Transformer Engine's debug statistics (debug/features/log_fp8_tensor_stats.py): an
*underflow* is a nonzero element that becomes zero, an *overflow*, here `saturated`, one whose magnitude is beyond
`fp8_max * scale_inv`. The scalings are those of TE's recipes with their defaults:

- `delayed`: one scale, from earlier steps
- `current`: one scale, from the tensor's own amax
- `block`: a power of two for 1 x 128 elements of a row, 128 x 128 of a weight, in E4M3 (Float8BlockScaling)
- `mxfp8`: a power of two, rounded so that nothing saturates, for 1 x 32 elements of a row, in E4M3
  (MXFP8BlockScaling)

TE's second copy, with blocks along the columns for the other GEMMs, is not measured.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from precisionctl.codes import numerics
from precisionctl.codes.numerics import BLOCK, MX_BLOCK
from precisionctl.codes.statistics import FP8_SCALINGS, Loss, Scaling, Statistics

_BY_BLOCK: tuple[Scaling, ...] = ("block", "mxfp8")

_BLOCK_DTYPE = torch.float8_e4m3fn  # in both recipes, forward and backward
_ROUNDING = 1 - 2.0**-22
"""`amax * (fp8_max / amax)` can exceed fp8_max by the rounding of three FP32 operations; that is no saturation."""


def measure(
    values: Tensor,
    dtype: torch.dtype,
    delayed_scale: Tensor | None,
    *,
    square: bool = False,
    amax: Tensor | None = None,
) -> Statistics:
    """Statistics of `values` `[..., columns]` of any float dtype, on any device, with a fixed amount of memory.

    `dtype` holds the codes of delayed and current scaling. `delayed_scale` is FP32 `[]`; None leaves delayed scaling
    unmeasured. `square` is for weights, whose blocks are 128 x 128. A tensor may come in parts, of a multiple of 128
    rows each but the last: then `amax`, FP32 `[]`, is that of the whole, and the merged parts are what the whole gives.
    """
    rows = values.detach().reshape(-1, values.shape[-1] if values.dim() else 1)
    if rows.numel() == 0:
        return Statistics()
    own = numerics.amax(rows)
    largest = own if amax is None else amax
    fixed: dict[Scaling, Tensor] = {"current": numerics.current_scale(largest.float(), dtype)}
    if delayed_scale is not None:
        fixed["delayed"] = delayed_scale
    parts = [_measure_tiles(tiles, dtype, fixed, square) for tiles in _tiles(rows)]
    nonzero, nonfinite, sum_2, sum_4, *lost = torch.stack(parts).sum(0).tolist()
    losses = dict.fromkeys(FP8_SCALINGS, Loss())
    for i, scaling in enumerate((*fixed, *_BY_BLOCK)):
        underflows, saturated, error = lost[3 * i : 3 * i + 3]
        losses[scaling] = Loss(rows.numel(), int(underflows), int(saturated), sum_2, error)
    zeros = rows.numel() - int(nonzero + nonfinite)
    return Statistics(rows.numel(), zeros, int(nonfinite), float(own), sum_2, sum_4, losses)


def _tiles(rows: Tensor) -> Iterator[Tensor]:
    """`rows` in pieces of FP32 `[n, 128, m, 4, 32]`: n x m tiles of 128 x 128, each row of a tile in 4 MX blocks of 32,
    padded with zeros at the edges."""
    across = min(math.ceil(rows.shape[1] / BLOCK), numerics.PIECE // BLOCK**2)
    down = max(1, numerics.PIECE // (across * BLOCK**2))
    height, width = down * BLOCK, across * BLOCK
    for row in range(0, rows.shape[0], height):
        for column in range(0, rows.shape[1], width):
            piece = rows[row : row + height, column : column + width].float()
            piece = torch.nn.functional.pad(piece, (0, -piece.shape[1] % BLOCK, 0, -piece.shape[0] % BLOCK))
            yield piece.view(piece.shape[0] // BLOCK, BLOCK, piece.shape[1] // BLOCK, BLOCK // MX_BLOCK, MX_BLOCK)


def _measure_tiles(tiles: Tensor, dtype: torch.dtype, fixed: Mapping[Scaling, Tensor], square: bool) -> Tensor:
    """FP64 `[4 + 3 * scalings]`: the count of nonzero elements, that of NaN and infinities, the sums of x^2 and x^4;
    then the three numbers of `_lost` for each `fixed` scale and for the two block scalings."""
    magnitudes = tiles.abs()
    mx_amax = magnitudes.amax(4, keepdim=True)
    nonfinite = torch.zeros((), device=tiles.device)
    if not bool(mx_amax.isfinite().all()):
        magnitudes = magnitudes.nan_to_num(nan=0.0, posinf=math.inf)
        mx_amax = magnitudes.amax(4, keepdim=True)
        nonfinite = (~tiles.isfinite()).sum()
        tiles = tiles.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    block_amax = mx_amax.amax((1, 3) if square else 3, keepdim=True)
    squares = tiles.double().square_().view(-1)
    nonzero = torch.count_nonzero(tiles)
    found = [nonzero, nonfinite, squares.sum(), squares.dot(squares)]
    for scale in fixed.values():
        found += _lost(tiles, magnitudes, nonzero, scale, dtype)
    for scale in (numerics.block_scale(block_amax, _BLOCK_DTYPE), numerics.mx_scale(mx_amax, _BLOCK_DTYPE)):
        found += _lost(tiles, magnitudes, nonzero, scale, _BLOCK_DTYPE)
    return torch.stack([number.double() for number in found])


def _lost(tiles: Tensor, magnitudes: Tensor, nonzero: Tensor, scale: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """How many elements a scaling makes zero, how many it clamps, and the sum of the squared errors; each `[]`."""
    largest, scale_inv = numerics.largest_code(dtype), scale.reciprocal()
    decoded = (tiles * scale).clamp_(-largest, largest).to(dtype).float()
    left = torch.count_nonzero(decoded)
    limit = (largest * scale_inv).clamp(max=torch.finfo(torch.float32).max)  # so that an infinity is beyond it
    saturated = torch.count_nonzero(magnitudes * _ROUNDING > limit)
    return [nonzero - left, saturated, decoded.mul_(scale_inv).sub_(tiles).double().square_().sum()]
