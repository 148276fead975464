"""Row kinds: how the tensors of one Megatron parameter stand in a Hugging Face checkpoint.

A row names its tensors in both layouts, whole, with `{layer}` for the layer. `merge` takes the Hugging
Face tensors to the Megatron one and `split` is its inverse. Both only move rows (dimension 0), so they
work on values and on row numbers alike, which is what `lower.py` uses to turn a row into copies.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from precisionctl.model_shape import ModelShape
from precisionctl.param import GATED_ROWS, REPLICATED, ROWS, Layout, Parallel


@dataclass(frozen=True)
class Present:
    """Switches of ModelShape, by layout, without which a row's tensors do not exist there.

    Where only one side has them they are zero biases: filled with zeros on the way there, and checked
    to be zero on the way back.
    """

    hf: str | None = None
    megatron: tuple[str, ...] = ()

    def in_layout(self, layout: Layout, model: ModelShape) -> bool:
        if layout == "hf":
            return self.hf is None or bool(getattr(model, self.hf))
        return not self.megatron or any(getattr(model, switch) for switch in self.megatron)


ALWAYS = Present()


class Row(Protocol):
    """One Megatron parameter and the Hugging Face tensors that it is made of."""

    @property
    def hf(self) -> tuple[str, ...]: ...
    @property
    def megatron(self) -> str: ...
    @property
    def parallel(self) -> Parallel: ...
    @property
    def present(self) -> Present: ...
    @property
    def gemm(self) -> bool:
        """Whether this is the weight of a GEMM that an FP8 recipe computes in FP8."""
        ...

    def shape(self, model: ModelShape) -> tuple[int, ...]:
        """Shape of the whole (all ranks') Megatron tensor."""
        ...

    def merge(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor: ...
    def split(self, whole: Tensor, model: ModelShape) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class Same:
    """The same tensor under another name. `sizes` are the fields of ModelShape that make its shape."""

    hf_name: str
    megatron: str
    sizes: tuple[str, ...]
    parallel: Parallel = REPLICATED
    present: Present = ALWAYS
    gemm: bool = False

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.hf_name,)

    def shape(self, model: ModelShape) -> tuple[int, ...]:
        return tuple(getattr(model, size) for size in self.sizes)

    def merge(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        return parts[0]

    def split(self, whole: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        return (whole,)


@dataclass(frozen=True)
class Vocabulary:
    """A matrix with a row per token. Megatron pads it with zero rows, which are cut off whatever they hold."""

    hf_name: str
    megatron: str
    present: Present = ALWAYS
    parallel: Parallel = ROWS
    gemm: bool = False

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.hf_name,)

    def shape(self, model: ModelShape) -> tuple[int, ...]:
        return (model.padded_vocab_size, model.hidden_size)

    def merge(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        (values,) = parts
        padding = values.new_zeros(model.padded_vocab_size - model.vocab_size, *values.shape[1:])
        return torch.cat([values[: model.vocab_size], padding])

    def split(self, whole: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        return (whole[: model.vocab_size],)


@dataclass(frozen=True)
class QKV:
    """Query, key and value, interleaved per query group: `[q_0 .. q_{r-1}, k, v]`, each of `kv_channels` rows.

    No rotary permutation: both sides rotate halves.
    """

    q: str
    k: str
    v: str
    megatron: str
    present: Present = ALWAYS
    parallel: Parallel = ROWS
    gemm: bool = True

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.q, self.k, self.v)

    def shape(self, model: ModelShape) -> tuple[int, ...]:
        rows = (model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels
        return (rows, model.hidden_size) if self.gemm else (rows,)

    def merge(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        grouped = [part.reshape(model.num_query_groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(self, whole: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        grouped = whole.reshape(model.num_query_groups, -1, *whole.shape[1:])
        queries = model.num_attention_heads // model.num_query_groups * model.kv_channels
        parts = torch.split(grouped, [queries, model.kv_channels, model.kv_channels], dim=1)
        return tuple(part.flatten(0, 1) for part in parts)


@dataclass(frozen=True)
class GateUp:
    """The two halves of a gated MLP's first linear: all of gate, then all of up."""

    gate: str
    up: str
    megatron: str
    present: Present = ALWAYS
    parallel: Parallel = GATED_ROWS
    gemm: bool = True

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.gate, self.up)

    def shape(self, model: ModelShape) -> tuple[int, ...]:
        rows = 2 * model.ffn_hidden_size
        return (rows, model.hidden_size) if self.gemm else (rows,)

    def merge(self, parts: Sequence[Tensor], model: ModelShape) -> Tensor:
        return torch.cat(list(parts))

    def split(self, whole: Tensor, model: ModelShape) -> tuple[Tensor, ...]:
        return whole.chunk(2)


@dataclass(frozen=True)
class Architecture:
    """One family's table.

    `model_types` maps each Hugging Face `model_type` to its class. `aliases` are Hugging Face tensors that,
    if stored at all under the given switch, must equal another one (a tied `lm_head`). `derived` are Hugging
    Face tensors that a model makes again by itself, as patterns with `{layer}`.
    """

    model_types: Mapping[str, str]
    rows: tuple[Row, ...]
    aliases: tuple["Alias", ...] = ()
    derived: tuple[str, ...] = ()


@dataclass(frozen=True)
class Alias:
    """A Hugging Face tensor `hf` that, while `switch` of ModelShape is on, is a copy of `of`."""

    hf: str
    of: str
    switch: str


def layers(template: str, model: ModelShape) -> Iterator[int | None]:
    """The layers that a name with `{layer}` stands for; a single None for a name without."""
    yield from range(model.num_layers) if "{layer}" in template else (None,)
