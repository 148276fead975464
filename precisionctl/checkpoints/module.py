"""A live model as the source or the target of a conversion: its chunks are its tensors themselves.

It has no files, and its FP8 state is taken and set module by module (`fp8_state`, `set_fp8_state`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from precisionctl.checkpoints.base import Chunk, whole
from precisionctl.fp8.encoding import Encoding
from precisionctl.model_shape import ModelShape
from precisionctl.param import Layout, TensorSpec


@dataclass(frozen=True)
class LiveModel:
    """Tensors by Megatron name: parameters, or FP32 tensors that stand for them (masters, moments)."""

    model: ModelShape
    tensors: Mapping[str, Tensor]
    layout: Layout = "megatron"
    encodings: Mapping[str, Encoding] = field(default_factory=dict)

    @cached_property  # a run asks for it several times a piece
    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()}

    def chunks(self, name: str) -> Sequence[Chunk]:
        return [Chunk(whole(self.specs[name]), self.tensors[name])]

    def lay_out(self) -> None:
        """Nothing to do: the tensors are there."""
