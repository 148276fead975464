"""GGUF, the files of llama.cpp."""

from precisionctl.checkpoints.gguf.reader import CONTAINER

__all__ = ["CONTAINER"]
