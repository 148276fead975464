"""FP8 weights in the files of ranks: each shard has scales of its own, and the whole weight one grid of them."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from precisionctl.checkpoints.base import shard_boxes
from precisionctl.checkpoints.encodings_file import EncodingsOnDemand
from precisionctl.checkpoints.te_tensors import LocatedFp8Weight
from precisionctl.checkpoints.torch_legacy.rank_shards import Shard, ShardedTensor
from precisionctl.checkpoints.torch_zip import LocatedTensor, read_located
from precisionctl.errors import DamagedCheckpoint, PrecisionError
from precisionctl.fp8.elements import E4M3
from precisionctl.fp8.encoding import Encoding, by_rows, grid_shape, of_rows
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.base import Scales, encoding

CODES = torch.float8_e4m3fn

Fp8Weights = dict[tuple[Path, int], LocatedFp8Weight]
"""FP8 weights by the file and the byte where their codes start."""


def codes_of(weight: LocatedFp8Weight, path: Path, found: Fp8Weights) -> LocatedTensor:
    """The codes of an FP8 weight as a tensor like others, and a note in `found` of what it was. Raises
    DamagedCheckpoint."""
    codes, scale = weight.codes, weight.scale_inv
    if not isinstance(codes, LocatedTensor) or codes.dtype != torch.uint8 or len(codes.shape) != 2:
        raise DamagedCheckpoint("an FP8 weight without codes that could be read", where=path)
    of_scales = isinstance(scale, LocatedTensor) and scale.dtype in (torch.float32, torch.uint8)
    if not of_scales or len(scale.shape) > 2 or 0 in scale.shape:
        raise DamagedCheckpoint("an FP8 weight without scales that could be read", where=path)
    if found.setdefault((path, codes.offset), weight) != weight:
        raise DamagedCheckpoint("two FP8 weights are the same codes, with other scales", where=path)
    return codes._replace(dtype=CODES)


def encodings_of(tensors: Mapping[str, ShardedTensor], found: Fp8Weights) -> EncodingsOnDemand:
    """How the codes among tensors decode, by logical name."""
    weights = {name: tensor for name, tensor in tensors.items() if tensor.spec.dtype == CODES}

    def read(name: str) -> Encoding:
        shards = [_of_replicas(name, replicas, found) for replicas in weights[name].shards]
        # The encoding of a weight out of those of its shards: moved as their rows are, or side by side
        boxes = shard_boxes(weights[name].spec, len(shards))
        if weights[name].spec.parallel.kind == "columns" and len(shards) > 1:
            return _side_by_side(name, weights[name].spec, shards)
        parts: list[tuple[int, Tensor]] = []
        for shard, of_rank in zip(shards, boxes, strict=True):
            rows, first = by_rows(shard, sum(box.rows for box in of_rank)), 0
            for box in of_rank:
                parts.append((box.row, rows[first : first + box.rows]))
                first += box.rows
        whole = torch.cat([rows for _, rows in sorted(parts, key=lambda part: part[0])])
        return of_rows(whole, shards[0], weights[name].spec.columns)

    return EncodingsOnDemand(weights, read)


def _of_replicas(name: str, replicas: tuple[Shard, ...], found: Fp8Weights) -> Encoding:
    """The encoding of a shard. Raises DamagedCheckpoint where its replicas have different scales."""
    first, *others = (_of_shard(name, shard, found) for shard in replicas)
    for shard, other in zip(replicas[1:], others, strict=True):
        if first.block != other.block or not torch.equal(first.scale_inv.float(), other.scale_inv.float()):
            raise DamagedCheckpoint(
                f"`{name}` has other scales than in {replicas[0].rank.path.parent.name}",
                where=shard.rank.path,
                do="Ranks that hold the same tensor must agree. Do these files belong to one checkpoint?",
            )
    return first


def _of_shard(name: str, shard: Shard, found: Fp8Weights) -> Encoding:
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
    return encoding(grid[:high, :wide].contiguous(), Scales(name, None, block), spec, path)  # what pads is cut off


def _side_by_side(name: str, spec: TensorSpec, shards: list[Encoding]) -> Encoding:
    high, wide = shards[0].block
    columns = spec.columns // len(shards)
    if columns % wide:
        raise PrecisionError(
            f"the blocks of `{name}` end at the {columns} columns of a rank, and not at {wide}",
            do="Save it again with another tensor-parallel size, or in BF16.",
        )
    return Encoding(E4M3, torch.cat([shard.scale_inv.float() for shard in shards], 1), (high, wide))
