"""Checkpoints of LitGPT: a model in one file, with names of its own for all families."""

from precisionctl.checkpoints.litgpt.reader import CONTAINER

__all__ = ["CONTAINER"]
