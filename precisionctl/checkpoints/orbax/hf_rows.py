"""Hugging Face's tensors as rows that are made of MaxText's arrays when they are read.

MaxText's kernels are `[in, out]`, and of heads `[in, heads, size]` or `[heads, size, out]`; Hugging Face's weights are
`[out, in]`. Layers that are scanned are dimension 1 of one array, experts dimension 0. Its Llama 3.1 has the two
numbers of a rotary pair beside each other, Hugging Face in the two halves of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from precisionctl.checkpoints.orbax.decoded_chunks import DecodedChunks
from precisionctl.checkpoints.orbax.zarr_array import ZarrArray
from precisionctl.checkpoints.other_trainers.maxtext_families import EMBEDDING, HEAD, MaxTextFamily, ParameterPlace
from precisionctl.errors import DamagedCheckpoint
from precisionctl.model.model_shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class HfRows:
    """A tensor `[outputs, inputs]`, or `[outputs]`, of an array whose other dimensions are `fixed` at a place.

    It has `most` rows at most, behind which the array is padded. Values are multiplied by `times`, divided by `over`
    and lowered by `less`, in FP32, and rounded to the array's dtype. With `pairs` each head's rows are rotary pairs.
    """

    decoded: DecodedChunks
    array: ZarrArray
    outputs: tuple[int, ...]
    inputs: tuple[int, ...] = ()
    fixed: Mapping[int, int] = field(default_factory=dict)
    most: int | None = None
    pairs: bool = False
    times: float = 1.0
    over: float = 1.0
    less: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = (math.prod(self.array.shape[one] for one in many) for many in (self.outputs, self.inputs))
        rows = rows if self.most is None else min(rows, self.most)
        return (rows, columns) if self.inputs else (rows,)

    def rows(self, row: int, rows: int) -> Tensor:
        """Rows `[row, row + rows)` as `[rows, columns]`, as Hugging Face has them. Raises as `DecodedChunks.read`."""
        head = math.prod(self.array.shape[one] for one in self.outputs[1:])
        first, last = row // head, -(-(row + rows) // head)
        box = [range(size) for size in self.array.shape]
        box[self.outputs[0]] = range(first, last)
        for dimension, at in self.fixed.items():
            box[dimension] = range(at, at + 1)
        values = self.decoded.read(self.array, box).permute(*self.outputs, *self.inputs, *self.fixed)
        if self.pairs:
            values = values.reshape(last - first, head // 2, 2, -1).transpose(1, 2)
        values = values.reshape((last - first) * head, -1)[row - first * head :][:rows]
        if (self.times, self.over, self.less) != (1.0, 1.0, 0.0):
            values = (values.float() * self.times / self.over - self.less).to(values.dtype)
        return values.contiguous()


def hf_rows(
    decoded: DecodedChunks, array: ZarrArray, place: ParameterPlace, family: MaxTextFamily, model: ModelShape, kind: str
) -> Iterator[tuple[str, HfRows]]:
    """Hugging Face's tensors, by name, that are in an array: weights, or moments of a `kind`. Raises DamagedCheckpoint
    for an array whose dimensions are not a parameter's of this model."""
    inside, shape = place.inside, array.shape
    experts = model.moe.num_experts if model.moe and "{expert}" in place.hf else None
    stacked = {0: experts, 1: None if place.layers is None else len(place.layers)}
    fixed = {one: size for one, size in stacked.items() if size is not None}
    free = tuple(one for one in range(len(shape)) if one not in fixed)
    is_matrix = inside.endswith(".kernel") or experts is not None
    inputs = free[: 2 if inside.endswith("out.kernel") else int(is_matrix)]
    outputs = free[len(inputs) :]
    if inside == EMBEDDING:
        outputs, inputs = free[:1], free[1:]
    if not outputs or any(one >= len(shape) or shape[one] != size for one, size in fixed.items()):
        kinds = [f"{size} {'layers' if one else 'experts'} in dimension {one}" for one, size in fixed.items()]
        what = f"`{array.name}` is {list(shape)}, and not a parameter with {' and '.join(kinds) or 'more dimensions'}"
        do = "Is the reference this model's? Stacks of layers are read with MaxText's default, param_scan_axis 1."
        raise DamagedCheckpoint(what, do=do)
    heads = model.num_query_groups if inside.split(".")[1] in _OF_GROUPS else model.num_attention_heads
    if any(len(many) == 2 and shape[many[0]] != heads for many in (inputs, outputs)):
        what = f"`{array.name}` is {list(shape)}, and the model has {heads} such heads"
        raise DamagedCheckpoint(what, do="Is the reference this model's?")
    settings: dict[str, Any] = _arithmetic(inside, family, model, kind)
    if inside in (EMBEDDING, HEAD) and 0 < shape[outputs[0]] - model.vocab_size < _MOST_PADDING:
        settings["most"] = model.vocab_size
    if inside in (_QUERY, _KEY) and (model.rope_scaling or {}).get("rope_type") == family.pairs_by is not None:
        if [shape[one] for one in outputs[1:]] != [model.kv_channels] or model.kv_channels % 2:
            what = f"`{array.name}` is {list(shape)}, and heads of {model.kv_channels} are turned in pairs"
            raise DamagedCheckpoint(what, do="Is the reference this model's?")
        settings["pairs"] = True
    for name, layer, expert in place.names(experts or 0):
        at = {one: number for one, number in ((0, expert), (1, layer)) if number is not None}
        yield name, HfRows(decoded, array, outputs, inputs, at, **settings)


_QUERY, _KEY = "self_attention.query.kernel", "self_attention.key.kernel"
_OF_GROUPS = ("key", "value")
_MOST_PADDING = 256
"""Rows that MaxText pads a vocabulary with are fewer (`_validate_or_update_architecture` in its to_huggingface.py)."""


def _arithmetic(inside: str, family: MaxTextFamily, model: ModelShape, kind: str) -> dict[str, float]:
    """What makes Hugging Face's values of MaxText's. Where a weight is multiplied by a factor, its gradient is divided
    by it, and so are moments: `exp_avg_sq` by the factor's square."""
    power = {"": 0, "exp_avg": 1, "exp_avg_sq": 2}[kind]
    if inside == _QUERY and family.scaled_queries:
        factor = math.sqrt(model.kv_channels)
        return {"over": factor**power} if power else {"times": factor}
    if inside == EMBEDDING and family.scaled_embeddings:
        factor = math.sqrt(model.hidden_size)
        factor = _in_bf16(factor) if family.rounded_scale else factor
        return {"times": factor**power} if power else {"over": factor}
    plus_one = family.norms_plus_one and inside.endswith("norm.scale") and not power
    return {"less": 1.0} if plus_one else {}


def _in_bf16(value: float) -> float:
    """The nearest number in BF16, of two that are as near the one whose last bit is zero."""
    bits = int(np.float32(value).view(np.uint32))
    return float(np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32))
