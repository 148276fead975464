"""Codes that are what is wanted already: they are copied, and no number of them is looked at.

An FP8 code decoded to FP32 and encoded under the same scale is the same code, so nothing is lost by not doing it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from precisionctl.fp8.encoding import Encoding
from precisionctl.fp8.numerics import FP8_MAX
from precisionctl.param import TensorSpec
from precisionctl.planning.encode import Encode

_SMALLEST = torch.finfo(torch.float32).tiny * 2.0**16
"""Of scales; under it codes could decode to numbers that FP32 flushes to zero."""


def passed_on(
    encode: Encode,
    stored: Mapping[str, Encoding],
    carried: Mapping[str, Encoding],
    targets: Mapping[str, TensorSpec],
) -> dict[str, Tensor] | None:
    """The grids of scales to write, FP32 by the weight's name, if all weights that are to be encoded are stored under
    the scales that are `carried`, and may keep them in the blocks and dtypes that are wanted; with those that share
    their scale. Else None."""
    grids: dict[str, Tensor] = {}
    together = {name: (targets[name].rows, targets[name].columns) for name in encode.alongside}
    for name, block in (*encode.blocks.items(), *together.items()):
        before, spec = carried.get(name), targets[name]
        if before is None or name not in stored or not _same(stored[name], before) or before.dtype != spec.dtype:
            return None
        grid = before.in_blocks(spec.rows, spec.columns, block)
        dtype = targets[encode.weight_scales[name]].dtype if name in encode.blocks else torch.float32
        held = grid.to(torch.float8_e8m0fnu if dtype == torch.uint8 else dtype).float()
        sound = (grid >= _SMALLEST) & (grid * FP8_MAX[spec.dtype]).isfinite() & (held == grid)
        if not bool(sound.all()):
            return None
        grids[name] = grid
    one = [grid.reshape(-1) for grid in grids.values()] if encode.shared else []
    return {name: grids[name] for name in encode.blocks} if all(torch.equal(grid, one[0]) for grid in one) else None


def _same(a: Encoding, b: Encoding) -> bool:
    """Whether two encodings are one."""
    scales = [each.scale_inv.float() for each in (a, b)]
    return (a.dtype, a.block) == (b.dtype, b.block) and torch.equal(*scales)
