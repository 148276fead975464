"""The flat buckets of Megatron's distributed optimizer (`dp_reshardable`), unpacked into one tensor per parameter.

Each model-parallel rank has its own buffers, one for each virtual pipeline stage. A buffer holds the rank's parameters
in reverse order, each aligned to 64 elements, in one or more buckets whose ends are padded for data parallelism; the
padding is not stored (megatron/core/distributed/param_and_grad_buffer.py, _ParamAndGradBuffer;
optimizer/distrib_optimizer.py, sharded_param_state_dp_reshardable). No names are stored: which parameter is where is
inferred from the shapes, from how the model's own tensors are cut, and from where pieces begin and end.
`torch_dist/masters.py` checks the result against the weights.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from precisionctl.checkpoints.chunks import Box
from precisionctl.checkpoints.megatron.keys import expert_of, layer_of
from precisionctl.checkpoints.megatron.parameter_order import Modules, ordered
from precisionctl.checkpoints.torch_files import dcp_metadata
from precisionctl.checkpoints.torch_files.dcp_tensors import LogicalTensor, TensorPart, flat_boxes
from precisionctl.dtypes import DType
from precisionctl.param import EMBEDDING, KINDS, NOT_TRAINED, OUTPUT, TensorSpec, kind_and_parameter, state_name

_KEY = re.compile(
    r"(?:chained_(\d{1,3})\.)?optimizer\.distributed\.dp_group_idx_(\d{1,6})\.gbuf_idx_(\d{1,3})"
    r"\.dtype_\(torch\.\w+, torch\.\w+\)\.bucket_idx_(\d{1,6})\.(param|exp_avg|exp_avg_sq)"
)
_ALIGNMENT = 64


class _Bucket:
    """The flat tensors of a bucket: for each kind its length, its stored pieces, and the element where each begins."""

    def __init__(self, tensors: Mapping[str, dcp_metadata.DcpTensor]) -> None:
        self.length = tensors["param"].shape[0]
        self.dtypes = {kind: tensor.dtype for kind, tensor in tensors.items()}
        self.pieces = {kind: sorted(one.pieces, key=lambda piece: piece.offsets) for kind, one in tensors.items()}
        self.starts = {kind: [piece.offsets[0] for piece in pieces] for kind, pieces in self.pieces.items()}

    def begins_piece(self, element: int) -> bool:
        at = bisect_left(self.starts["param"], element)
        return at < len(self.starts["param"]) and self.starts["param"][at] == element

    def within(self, kind: str, begin: int, end: int) -> list[dcp_metadata.DcpPiece]:
        """The pieces that have elements of `[begin, end)`."""
        first, last = bisect_right(self.starts[kind], begin) - 1, bisect_left(self.starts[kind], end)
        return self.pieces[kind][first:last]


class _Place(NamedTuple):
    """A rank's shard of a parameter, boxes that follow each other in its memory, and where that is: the number of a
    bucket in its buffer, and elements `[start, end)` there."""

    name: str
    boxes: Sequence[Box]
    bucket: int
    start: int
    end: int


def is_bucket(name: str) -> bool:
    """Whether a stored tensor of this name is a bucket."""
    return _KEY.fullmatch(name) is not None


def unpack_buckets(
    stored: Mapping[str, dcp_metadata.DcpTensor], model: Mapping[str, LogicalTensor], kinds: Iterable[Modules]
) -> dict[str, LogicalTensor] | None:
    """The optimizer's tensors, `optimizer.state.<kind>.<parameter>`, for the model whose tensors are `model`.

    `kinds` are the orders of modules to try, the likeliest first. None if the buckets fit none of them.
    """
    buffers = _buffers(stored)
    for modules in kinds if buffers and EMBEDDING in model else ():
        names = ordered((name for name in model if not name.endswith(NOT_TRAINED)), modules)
        found = _Unpacking(buffers, model, names).tensors() if names else None
        if found is not None:
            return found
    return None


class _BufferKey(NamedTuple):
    """A buffer: of which optimizer (0: dense, 1: experts) and model-parallel rank it is, and which of that rank's.

    A rank has one for each dtype of each of its virtual stages, and none for a dtype that a stage lacks. If the first
    of two stages has a gated delta net, whose A_log is FP32, and the second has none, BF16 and FP32 of the first are at
    0 and 1, and BF16 of the second at 2.
    """

    optimizer: int
    rank: int
    position: int


_Buffers = dict[_BufferKey, list[_Bucket]]


def _buffers(stored: Mapping[str, dcp_metadata.DcpTensor]) -> _Buffers:
    """The buckets of each buffer; empty unless all are there, flat, and of one dtype for each kind."""
    found: dict[_BufferKey, dict[int, dict[str, dcp_metadata.DcpTensor]]] = {}
    for key, tensor in stored.items():
        if match := _KEY.fullmatch(key):
            key_of = _BufferKey(int(match[1] or 0), int(match[2]), int(match[3]))
            found.setdefault(key_of, {}).setdefault(int(match[4]), {})[match[5]] = tensor
    dtypes = {(kind, one.dtype) for buckets in found.values() for b in buckets.values() for kind, one in b.items()}
    for buckets in found.values():
        shapes = [{tensor.shape for tensor in bucket.values()} for bucket in buckets.values()]
        whole = set(buckets) == set(range(len(buckets))) and all(set(b) == set(KINDS) for b in buckets.values())
        if not whole or len(dtypes) != len(KINDS) or any(len(s) > 1 or len(min(s)) != 1 for s in shapes):
            return {}
    return {of: [_Bucket(buckets[index]) for index in range(len(buckets))] for of, buckets in found.items()}


class _Unpacking:
    """An attempt to match the buckets of a checkpoint with one order of the parameters."""

    def __init__(self, buffers: _Buffers, model: Mapping[str, LogicalTensor], names: Sequence[str]) -> None:
        self._buffers, self._model = buffers, model
        self._apart = any(key.optimizer == 1 for key in buffers)  # experts, where they are parallel
        self._tensor = len(model[EMBEDDING].parts)
        self._pipeline_ranks = max(1, self._ranks(0) // self._tensor)
        self._head = [name for name in names if name.startswith("embedding.")]
        self._tail = [name for name in names if not layer_of(name) and name not in self._head]
        self._layers: dict[int, list[str]] = {}
        for name in names:
            if layer := layer_of(name):
                self._layers.setdefault(layer[0], []).append(name)
        self._experts = 1 + max((expert_of(name) or 0 for name in names), default=0)
        self._found: dict[str, list[TensorPart]] = {state_name(kind, name): [] for name in names for kind in KINDS}
        self._seen: set[tuple[str, Box]] = set()

    def _ranks(self, optimizer: int) -> int:
        return 1 + max((key.rank for key in self._buffers if key.optimizer == optimizer), default=0)

    def tensors(self) -> dict[str, LogicalTensor] | None:
        """The optimizer's tensors; None if something does not fit."""
        of_rank = Counter(key.rank for key in self._buffers if key.optimizer == 0)
        for rank in range(self._ranks(0)):
            if any(_BufferKey(0, rank, at) not in self._buffers for at in range(max(of_rank[rank], 1))):
                return None
        stages = self._split()
        for optimizer in (0, 1) if self._apart else (0,):
            width = self._ranks(optimizer) // self._pipeline_ranks
            for rank in range(width * self._pipeline_ranks):
                if stages is None or not self._unpack_rank(optimizer, rank, width, stages):
                    return None
        dtypes = next(iter(self._buffers.values()))[0].dtypes
        tensors = {}
        for name, parts in self._found.items():
            kind, parameter = kind_and_parameter(name)
            spec = TensorSpec(self._model[parameter].spec.shape, dtypes[kind])
            if sum(part.box.elements for part in parts) != spec.rows * spec.columns:  # of ranks that are not there
                return None
            tensors[name] = LogicalTensor(spec, tuple(parts))
        return tensors

    def _split(self) -> list[list[str]] | None:
        """The parameters of each virtual stage, found by giving each as many layers as fill the next buffers of its
        pipeline rank exactly. The last one is that with which all layers and all buffers are used up."""
        of_rank = Counter(key.rank for key in self._buffers if key.optimizer == 0)
        buffers = [of_rank[rank * self._tensor] for rank in range(self._pipeline_ranks)]
        used, first, stages = [0] * self._pipeline_ranks, 0, list[list[str]]()
        while sum(used) < sum(buffers):
            rank = len(stages) % self._pipeline_ranks
            if rank == self._pipeline_ranks - 1:
                names = self._stage(first, len(self._layers) - first, not stages, is_last=True)
                if [*used[:-1], used[-1] + (self._filled(names, rank, used[rank]) or 0)] == buffers:
                    return [*stages, names]
            for count in range(len(self._layers) - first + 1):
                names = self._stage(first, count, not stages, is_last=False)
                if (filled := self._filled(names, rank, used[rank])) is not None:
                    break
            else:
                return None
            used[rank] += filled
            stages.append(names)
            first += count
        return None

    def _stage(self, first: int, count: int, is_first: bool, *, is_last: bool) -> list[str]:
        """The parameters of a virtual stage with these layers. The last of several stages has a copy of the embedding,
        if it is tied or for multi-token prediction."""
        names = list(self._head) if is_first else []
        if is_last and not is_first and any(name.startswith("mtp.") for name in self._tail):
            names.append(EMBEDDING)
        for layer in range(first, first + count):
            names += self._layers.get(layer, [])
        if is_last:
            names += self._tail
            if not is_first and OUTPUT not in self._tail and EMBEDDING not in names:
                names.append(EMBEDDING)
        return names

    def _filled(self, names: list[str], pipeline_rank: int, position: int) -> int | None:
        """How many dense buffers of a pipeline rank, from this position on, exactly these parameters of a virtual
        stage fill; None if they fill none. No parameters fill no buffer, if none is left."""
        rank = pipeline_rank * self._tensor
        groups = self._groups(names, 0)
        if not groups:
            return None if _BufferKey(0, rank, position) in self._buffers else 0
        keys = (_BufferKey(0, rank, position + at) for at in range(len(groups)))
        layouts = (self._layout(one, key, 0, self._tensor) for one, key in zip(groups, keys, strict=True))
        return len(groups) if all(layout is not None for layout in layouts) else None

    def _groups(self, names: list[str], optimizer: int) -> list[list[str]]:
        """The names that this optimizer has, in one list for each dtype, since each dtype has its own buffer."""
        groups: dict[DType, list[str]] = {}
        for name in names:
            if not self._apart or (expert_of(name) is not None) == (optimizer == 1):
                groups.setdefault(self._model[name].spec.dtype, []).append(name)
        return list(groups.values())

    def _unpack_rank(self, optimizer: int, rank: int, width: int, stages: list[list[str]]) -> bool:
        position = 0
        for stage in stages[rank // width :: self._pipeline_ranks]:
            for group in self._groups(stage, optimizer):
                key = _BufferKey(optimizer, rank, position)
                layout = self._layout(group, key, rank % width, width)
                if layout is None:
                    return False
                for place in layout:
                    self._take(place, self._buffers[key][place.bucket])
                position += 1
        return True

    def _layout(self, names: list[str], buffer: _BufferKey, rank: int, width: int) -> list[_Place] | None:
        """Where each parameter is in a buffer, from the last to the first; None unless they fill it exactly."""
        buckets = self._buffers.get(buffer)
        if buckets is None:
            return None
        layout, bucket, end = list[_Place](), 0, 0
        for name in reversed(names):
            boxes = self._shard(name, rank, width)
            if not boxes:
                continue
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            if end and buckets[bucket].length in (start, end):  # full, but for padding
                bucket, start = bucket + 1, 0
            end = start + sum(box.elements for box in boxes)
            if bucket == len(buckets) or end > buckets[bucket].length or not buckets[bucket].begins_piece(start):
                return None
            layout.append(_Place(name, boxes, bucket, start, end))
        filled = bucket == len(buckets) - 1 and buckets[bucket].length in (end, -(-end // _ALIGNMENT) * _ALIGNMENT)
        return layout if filled else None

    def _shard(self, name: str, rank: int, width: int) -> Sequence[Box]:
        """A rank's shard of a parameter, cut as the model's own pieces are; empty for an expert of another rank.

        Gate and up are cut separately, so with two ranks the first has the first and the third of four boxes.
        """
        boxes = sorted((part.box for part in self._model[name].parts), key=lambda box: (box.row, box.column))
        expert = expert_of(name)
        size = self._tensor
        if expert is not None and self._apart:
            # The expert tensor size is the number of parts of linear_fc2's weight, which has one part on each rank
            down = self._model.get(re.sub(r"linear_fc[12]\.(weight|bias)", "linear_fc2.weight", name))
            size = len(down.parts) if down else 0
            if not size or expert * (width // size) // self._experts != rank // size:
                return ()
        return boxes if len(boxes) == 1 else boxes[rank % size :: size]

    def _take(self, place: _Place, bucket: _Bucket) -> None:
        """Add a parameter's parts, unless another rank has the same boxes."""
        key = (place.name, place.boxes[0])
        if key in self._seen:
            return
        self._seen.add(key)
        for kind in KINDS:
            found = self._found[state_name(kind, place.name)]
            for piece in bucket.within(kind, place.start, place.end):
                begin = max(piece.offsets[0], place.start)
                end = min(piece.offsets[0] + piece.sizes[0], place.end)
                for box, offset in flat_boxes(place.boxes, begin - place.start, end - place.start):
                    found.append(TensorPart(box, piece, begin - piece.offsets[0] + offset))
