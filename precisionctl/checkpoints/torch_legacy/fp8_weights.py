"""FP8 weights in a Megatron `torch` checkpoint: the scales of the ranks' shards joined to one encoding per weight."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from precisionctl.checkpoints.chunks import shard_boxes
from precisionctl.checkpoints.hf_directory.encodings_file import EncodingsOnDemand
from precisionctl.checkpoints.torch_files.te_tensors import LocatedFp8Weight
from precisionctl.checkpoints.torch_files.torch_zip import LocatedTensor, read_located
from precisionctl.checkpoints.torch_legacy.rank_shards import Shard, ShardedTensor
from precisionctl.codes.elements import E4M3
from precisionctl.codes.encoding import Encoding, by_rows, from_rows, grid_shape
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, PrecisionError
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.coded_weights import encoding
from precisionctl.quant_methods.scales import Scales
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

CODES = DType.float8_e4m3fn

Fp8Weights = dict[tuple[Path, int], LocatedFp8Weight]
"""Shards of FP8 weights by file and the byte offset of their codes."""


def codes_of(weight: LocatedFp8Weight, path: Path, found: Fp8Weights) -> LocatedTensor:
    """The codes of a shard of an FP8 weight in the file `path`, as a tensor of dtype E4M3; the weight is added to
    `found`, from which `encodings_of` takes its scales.

    Raises DamagedCheckpoint for codes that are not uint8 `[rows, columns]`, scales that are not FP32 or uint8 (E8M0) of
    at most two dimensions, and codes that two weights share with different scales.
    """
    codes, scale = weight.codes, weight.scale_inv
    if not isinstance(codes, LocatedTensor) or codes.dtype != DType.uint8 or len(codes.shape) != 2:
        raise DamagedCheckpoint("an FP8 weight without codes that could be read", where=path)
    of_scales = isinstance(scale, LocatedTensor) and scale.dtype in (DType.float32, DType.uint8)
    if not of_scales or len(scale.shape) > 2 or 0 in scale.shape:
        raise DamagedCheckpoint("an FP8 weight without scales that could be read", where=path)
    if found.setdefault((path, codes.offset), weight) != weight:
        raise DamagedCheckpoint("two FP8 weights are the same codes, with other scales", where=path)
    return codes._replace(dtype=CODES)


def encodings_of(tensors: Mapping[str, ShardedTensor], found: Fp8Weights) -> EncodingsOnDemand:
    """The encoding of each FP8 weight among `tensors`, by logical name, read when it is asked for.

    Reading raises DamagedCheckpoint for missing or contradicting scales, and PrecisionError where shards cut a block.
    """
    weights = {name: tensor for name, tensor in tensors.items() if tensor.spec.dtype == CODES}

    def read(name: str) -> Encoding:
        spec = weights[name].spec
        shards = [_shard_encoding(name, replicas, found) for replicas in weights[name].shards]
        if spec.parallel.kind == "columns" and len(shards) > 1:
            high, wide = shards[0].block
            columns = spec.columns // len(shards)
            if columns % wide:
                raise PrecisionError(
                    f"the blocks of `{name}` end at the {columns} columns of a rank, and not at {wide}",
                    do="Save it again with another tensor-parallel size, or in BF16.",
                )
            return Encoding(E4M3, torch.cat([shard.scale_inv.float() for shard in shards], 1), (high, wide))
        # Cut by rows (fc1 into gate and up first): expand the scales to rows, and move these as the codes' rows
        parts: list[tuple[int, Tensor]] = []
        for shard, boxes in zip(shards, shard_boxes(spec, len(shards)), strict=True):
            rows, first = by_rows(shard, sum(box.rows for box in boxes)), 0
            for box in boxes:
                parts.append((box.row, rows[first : first + box.rows]))
                first += box.rows
        whole = torch.cat([rows for _, rows in sorted(parts, key=lambda part: part[0])])
        return from_rows(whole, shards[0], weights[name].spec.columns)

    return EncodingsOnDemand(weights, read)


def _shard_encoding(name: str, replicas: tuple[Shard, ...], found: Fp8Weights) -> Encoding:
    """The encoding of a shard. Raises DamagedCheckpoint where its replicas have different scales."""
    made = list[Encoding]()
    for shard in replicas:
        path, weight = shard.rank.path, found.get((shard.rank.path, shard.tensor.offset))
        if weight is None:
            raise DamagedCheckpoint(f"`{name}` is FP8 codes without scales", where=path)
        spec = TensorSpec(shard.tensor.shape, CODES)
        scale = read_located(path, weight.scale_inv)
        block = weight.block or (max(1, spec.rows), max(1, spec.columns))
        high, wide = grid_shape(spec.rows, spec.columns, block)
        grid = scale.reshape(-1, scale.shape[-1] if scale.dim() else 1)
        if weight.block is None and grid.numel() != 1 or grid.shape[0] < high or grid.shape[1] < wide:
            raise DamagedCheckpoint(f"`{name}` has scales of {list(scale.shape)}", where=path)
        own = grid[:high, :wide].contiguous()  # what pads is cut off
        made.append(encoding(own, Scales(name, None, block), spec, path))
    for shard, other in zip(replicas[1:], made[1:], strict=True):
        if not made[0].same(other):
            raise DamagedCheckpoint(
                f"`{name}` has other scales than in {replicas[0].rank.path.parent.name}",
                where=shard.rank.path,
                do="Ranks that hold the same tensor must agree. Do these files belong to one checkpoint?",
            )
    return made[0]
