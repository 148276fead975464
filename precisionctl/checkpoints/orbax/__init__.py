"""Checkpoints of Orbax, JAX's library for them, with the parameters of MaxText: `step_directory.py` finds and reads a
step, whose arrays are zarr's (`zarr_array.py`) in files or in TensorStore's OCDBT (`ocdbt.py`)."""

from precisionctl.checkpoints.orbax.reader import CONTAINER

__all__ = ["CONTAINER"]
