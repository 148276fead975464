"""The files that Mistral and Meta train and publish in: `consolidated*` weights beside a params.json."""

from precisionctl.checkpoints.consolidated.reader import CONTAINER

__all__ = ["CONTAINER"]
