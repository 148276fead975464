"""Adapters (LoRA) of PEFT and Megatron-Bridge with the model that they change, as one checkpoint."""

from precisionctl.checkpoints.adapter.reader import CONTAINER

__all__ = ["CONTAINER"]
