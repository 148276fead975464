"""Megatron's `torch_dist` container, PyTorch's distributed format: sharded tensors, and objects beside them."""

from precisionctl.checkpoints.torch_dist.reader import CONTAINER

__all__ = ["CONTAINER"]
