"""Megatron's `torch` container, which it calls legacy: a directory and an archive of torch.save for each rank."""

from precisionctl.checkpoints.torch_legacy.reader import CONTAINER

__all__ = ["CONTAINER"]
