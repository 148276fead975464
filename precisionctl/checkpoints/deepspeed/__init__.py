"""DeepSpeed's checkpoints: of ZeRO 0 to 3 as its ranks save them (`zero.py`), and universal ones (`universal.py`)."""

from precisionctl.checkpoints.deepspeed.reader import CONTAINER

__all__ = ["CONTAINER"]
