"""Codes that are what is wanted already: they are copied, and no number of them is looked at.

An FP8 code decoded to FP32 and encoded under the same scale is the same code, so nothing is lost by not doing it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from precisionctl.fp8.encoding import Encoding
from precisionctl.fp8.numerics import FP8_MAX
from precisionctl.param import TensorSpec
from precisionctl.planning.plan import Encode
from precisionctl.planning.segments import Segment

_SMALLEST = torch.finfo(torch.float32).tiny * 2.0**16
"""The smallest scale to copy; under a smaller one codes could decode to numbers that FP32 flushes to zero."""


def scales_if_unchanged(
    encode: Encode,
    segments: Sequence[Segment],
    stored: Mapping[str, Encoding],
    carried: Mapping[str, Encoding],
    targets: Mapping[str, TensorSpec],
) -> dict[str, Tensor] | None:
    """The grids of scales to write, FP32 by the weight's name, where a job can copy its codes; else None.

    It can where it does no more than encode weights, in their old rows and under their old names, that are `stored`
    under just the scales that are `carried`, and these may stay in the blocks and dtypes of the `targets`; and where
    the same holds of the weights of other jobs that share their scale.
    """
    moves = any((each.read, each.read_row) != (each.write, each.write_row) for each in segments)
    if moves or {segment.write for segment in segments} != encode.blocks.keys():
        return None
    grids: dict[str, Tensor] = {}
    whole = {name: (targets[name].rows, targets[name].columns) for name in encode.alongside}
    for name, block in (*encode.blocks.items(), *whole.items()):
        before, spec = carried.get(name), targets[name]
        if before is None or name not in stored or not _same(stored[name], before) or before.dtype != spec.dtype:
            return None
        grid = before.in_blocks(spec.rows, spec.columns, block)
        dtype = targets[encode.weight_scales[name]].dtype if name in encode.blocks else torch.float32
        if not _can_be_stored(grid, spec.dtype, dtype):
            return None
        grids[name] = grid
    one = [grid.reshape(-1) for grid in grids.values()] if encode.shared else []
    return {name: grids[name] for name in encode.blocks} if all(torch.equal(grid, one[0]) for grid in one) else None


def _can_be_stored(grid: Tensor, codes: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a dtype holds all these scales as they are, and every code decodes to a number of FP32 with them; bytes
    hold exponents."""
    held = grid.to(torch.float8_e8m0fnu if dtype == torch.uint8 else dtype).float()
    sound = (grid >= _SMALLEST) & (grid * FP8_MAX[codes]).isfinite() & (held == grid)
    return bool(sound.all())


def _same(a: Encoding, b: Encoding) -> bool:
    """Whether two encodings are one."""
    scales = [each.scale_inv.float() for each in (a, b)]
    return (a.dtype, a.block) == (b.dtype, b.block) and torch.equal(*scales)
