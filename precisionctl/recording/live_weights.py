"""The weights of a live transformers model as the source of a plan: which modules are which GEMMs, and their digest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch import Tensor, nn

from precisionctl.architectures.families import read_model
from precisionctl.checkpoints.chunks import Chunk, whole
from precisionctl.checkpoints.hf_directory.fused_experts import is_stack
from precisionctl.codes.encoding import Encoding
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.dtypes import DType
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import Layout, TensorSpec


@dataclass(frozen=True)
class LiveWeights:
    """A live model as a source for `digest_weights` and `make_plan`: tensors under their names in memory, with experts
    in one tensor as its slices."""

    model: ModelShape
    tensors: Mapping[str, Tensor]
    path: Path | None = None
    layout: Layout = "hf"
    encodings: Mapping[str, Encoding] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module) -> "LiveWeights":
        """The weights of a transformers model."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in model.state_dict().items():
            if is_stack(name, TensorSpec(tuple(tensor.shape), DType.of(tensor.dtype))):
                tensors |= {f"{name}[{expert}]": tensor[expert] for expert in range(len(tensor))}
            else:
                tensors[name] = tensor
        config = model.config.to_dict()  # type: ignore[union-attr, operator]
        return LiveWeights(read_model(config, type(model).__name__, tensors), tensors)

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(tuple(tensor.shape), DType.of(tensor.dtype)) for name, tensor in self.tensors.items()}

    def chunks(self, name: str) -> Sequence[Chunk]:
        return [Chunk(whole(self.specs[name]), self.tensors[name])]


def in_transformers(model: nn.Module) -> bool:
    """Whether a model is transformers', by its config."""
    return hasattr(getattr(model, "config", None), "model_type")


def digest_of(model: nn.Module) -> str | None:
    """The digest of a live transformers model's weights; None where this process has not all of them, and of a model of
    Megatron-Core, whose sizes nothing here reads."""
    from torch.distributed.tensor import DTensor

    if not in_transformers(model):
        return None
    parameters = list(model.parameters())
    if any(isinstance(each, DTensor) or not each.numel() for each in parameters):  # FSDP2's, and ZeRO 3's
        return None
    return digest_weights(LiveWeights.of(model))
