"""The frameworks, by name."""

from collections.abc import Callable, Mapping
from pathlib import Path

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.launch import accelerate, megatron_bridge, megatron_lm, nemo
from precisionctl.launch.base import Launch, LaunchSource

FRAMEWORKS: Mapping[str, Callable[[LaunchSource], Launch]] = {
    "megatron-lm": megatron_lm.launch,
    "megatron-bridge": megatron_bridge.launch,
    "nemo": nemo.launch,
    "accelerate": accelerate.launch,
}


def launch(checkpoint: Path, framework: str, iteration: int | None) -> Launch:
    """How to start this framework, a key of FRAMEWORKS, from a checkpoint; `iteration` as for open_checkpoint. Raises
    CheckpointError if the framework cannot load the checkpoint, and the errors of open_checkpoint."""
    return FRAMEWORKS[framework](LaunchSource(open_checkpoint(checkpoint, iteration), checkpoint))
