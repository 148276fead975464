"""NeMo 1's checkpoints: `.nemo`, a tar of configuration, tokenizer and weights, or the same unpacked in a directory."""

from precisionctl.checkpoints.nemo.reader import CONTAINER

__all__ = ["CONTAINER"]
