"""Adapters of PEFT (LoRA) with the model that they change, as one checkpoint."""

from precisionctl.checkpoints.adapter.reader import CONTAINER

__all__ = ["CONTAINER"]
