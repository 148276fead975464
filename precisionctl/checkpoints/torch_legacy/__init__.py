"""Megatron's `torch` container, which it calls legacy: for each rank a directory with an archive of torch.save."""

from precisionctl.checkpoints.torch_legacy.reader import CONTAINER

__all__ = ["CONTAINER"]
