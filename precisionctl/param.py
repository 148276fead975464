"""What flows through everything: TensorSpec, the description of a logical tensor.

Names are logical: one per layer and expert, with no rank, stage or stacking.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from precisionctl.fp8.elements import Element, Packing, element_of

Layout = Literal["hf", "megatron"]

GEMM_ALIGNMENT = 16
"""What FP8 GEMMs ask of both dimensions of every operand (cuBLASLt's leading dimensions; TE checks it in
transformer_engine/pytorch/utils.py, assert_dim_for_fp8_exec, and inference engines' CUTLASS kernels agree)."""


@dataclass(frozen=True)
class Parallel:
    """How tensor parallelism cuts a tensor.

    `replicated`: whole on every rank. `rows`: dimension 0, in `parts` equal parts that are each cut
    separately (2 for gate and up). `columns`: dimension 1.
    """

    kind: Literal["replicated", "rows", "columns"]
    parts: int = 1


REPLICATED = Parallel("replicated")
ROWS = Parallel("rows")
GATED_ROWS = Parallel("rows", parts=2)
COLUMNS = Parallel("columns")


@dataclass(frozen=True)
class Parallelism:
    """Sizes of the process groups of a Megatron run: how many ranks a checkpoint is cut for.

    `tensor`, `pipeline`, `expert` as `--tensor-model-parallel-size` and so on; `virtual` is the number of stages
    of each pipeline rank, `expert_tensor` cuts the experts' tensors in place of `tensor` (None: as `tensor`).
    `first_layers` and `last_layers` are the layers of the first and the last pipeline rank, where those are not as
    many as the others' (`--decoder-first-pipeline-num-layers`, `--decoder-last-pipeline-num-layers`).
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    first_layers: int | None = None
    last_layers: int | None = None

    def layers_of_ranks(self, layers: int) -> list[int]:
        """How many of a model's layers each pipeline rank has, of sizes as `planning.checks.with_stages` gives them."""
        ends = (self.first_layers, self.last_layers)
        told = [count for count in ends if count is not None]
        others = self.pipeline - len(told)
        middle = [(layers - sum(told)) // others] * others if others else []
        first, last = ([] if count is None else [count] for count in ends)
        return [*first, *middle, *last]

    def layers_of_stages(self, layers: int) -> list[int]:
        """How many of a model's layers each stage has, in the order in which a batch passes through them: stage
        i of rank p is the one of number i * pipeline + p."""
        return [count // self.virtual for count in self.layers_of_ranks(layers)] * self.virtual


ONE_RANK = Parallelism()


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and parallel form of a logical tensor; no data. Of codes of four bits `packing` says how they stand
    in a file, and `dtype` is that of their bytes in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parallel: Parallel = REPLICATED
    packing: Packing | None = None

    @cached_property  # all three are asked for with every piece
    def rows(self) -> int:
        """Length of dimension 0; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @cached_property
    def columns(self) -> int:
        """Elements of a row: the product of all dimensions but the first."""
        return math.prod(self.shape[1:])

    @cached_property
    def width(self) -> int:
        """How many of its `dtype` a row is stored in: `columns`, but of codes of four bits their bytes."""
        return self.packing.row_bytes(self.columns) if self.packing else self.columns

    @cached_property
    def nbytes(self) -> int:
        return self.rows * self.width * self.dtype.itemsize

    @property
    def element(self) -> Element:
        """Of codes: the numbers that they are."""
        return self.packing.element if self.packing else element_of(self.dtype)

    @property
    def stored_dtype(self) -> str:
        """PyTorch's name for what a file has."""
        return self.packing.element.stored if self.packing else str(self.dtype).removeprefix("torch.")
