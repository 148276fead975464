"""Copy codes without decoding them, where source and target have the same codes and scales.

A code decoded to FP32 and encoded under the same scale is the same code, so nothing is lost by not doing it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from precisionctl.codes.encoding import Encoding, scale_dtype
from precisionctl.param import TensorSpec
from precisionctl.planning.plan import JobCodes
from precisionctl.planning.segments import Segment
from precisionctl.torch_when_used import torch


def encodings_if_unchanged(
    codes: JobCodes,
    segments: Sequence[Segment],
    stored: Mapping[str, Encoding],
    former: Mapping[str, Encoding],
    targets: Mapping[str, TensorSpec],
) -> dict[str, Encoding] | None:
    """The encodings to write, by the weight's name, where a job can copy its codes; else None.

    It can if all its tensors are encoded and keep their names and rows, the source's encodings (`stored`) are the ones
    to use again (`former`), and the `targets` have blocks and dtypes that can hold these scales exactly. If weights
    share a scale, the same must be true of those of other jobs.
    """
    moves = any((each.read, each.read_row) != (each.write, each.write_row) for each in segments)
    if moves or {segment.write for segment in segments} != codes.weights.keys():
        return None
    found: dict[str, Encoding] = {}
    for name, scales in codes.measured.items():
        before, spec = former.get(name), targets[name]
        if before is None or name not in stored or not stored[name].same(before) or before.element != spec.element:
            return None
        levels = before.global_divides, before.zeros is not None
        if levels != (scales.global_divides, scales.zero_points is not None):
            return None
        if before.block != scales.block:
            if levels != (None, False):
                return None
            in_blocks = before.in_blocks(spec.rows, spec.columns, scales.block)
            before = replace(before, scale_inv=in_blocks, block=scales.block)
        # the dtype holds all scales as they are (bytes hold exponents), and with them no code decodes to infinity, nor
        # all of a block to zero, as a block of zeros has another scale
        grid, multipliers = before.scale_inv.float(), before.multipliers
        held = grid.to(scale_dtype(targets[scales.weight].dtype).torch).float()
        sound = (multipliers > 0) & (multipliers * before.element.largest).isfinite() & (held == grid)
        if not bool(sound.all()):
            return None
        found[name] = before
    if codes.group and codes.group.always:
        grids = [each.global_scale.value if each.global_scale else each.scale_inv.float() for each in found.values()]
        if not all(torch.equal(grid.reshape(-1), grids[0].reshape(-1)) for grid in grids):
            return None
    return {name: found[name] for name in codes.weights}
