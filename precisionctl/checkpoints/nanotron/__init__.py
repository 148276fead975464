"""Checkpoints of nanotron: a file for each parameter, and each rank's part of it."""

from precisionctl.checkpoints.nanotron.reader import CONTAINER

__all__ = ["CONTAINER"]
