"""Copy codes without decoding them, where source and target have the same codes and scales.

An FP8 code that is decoded to FP32 and encoded with the same scale is the same code, so the result is the same.
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
"""The smallest scale_inv for which codes are copied; with a smaller one FP32 could flush decoded values to zero."""


def scales_if_unchanged(
    encode: Encode,
    segments: Sequence[Segment],
    stored: Mapping[str, Encoding],
    carried: Mapping[str, Encoding],
    targets: Mapping[str, TensorSpec],
) -> dict[str, Tensor] | None:
    """The grids of scales to write, FP32 by the weight's name, if a job can copy its codes; else None.

    It can if all its tensors are encoded and keep their names and rows, the source's encodings (`stored`) are the ones
    to use again (`carried`), and the `targets` have blocks and dtypes that can hold these scales exactly. If weights
    share a scale, the same must be true of those of other jobs.
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
    """Whether `dtype` (uint8 means E8M0) holds all these scales exactly, and every code decodes to a finite FP32 number
    with them."""
    held = grid.to(torch.float8_e8m0fnu if dtype == torch.uint8 else dtype).float()
    sound = (grid >= _SMALLEST) & (grid * FP8_MAX[codes]).isfinite() & (held == grid)
    return bool(sound.all())


def _same(a: Encoding, b: Encoding) -> bool:
    """Whether two encodings are equal."""
    scales = [each.scale_inv.float() for each in (a, b)]
    return (a.dtype, a.block) == (b.dtype, b.block) and torch.equal(*scales)
