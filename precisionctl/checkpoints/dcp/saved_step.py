"""The step of a run whose trainer has it in a file of torch.save beside PyTorch's checkpoint (DCP).

- OLMo-core (3.0.0, train/trainer.py and train/checkpoint.py): `global_step` in `train/rank0.pt` of a step
- NeMo Automodel (0.7, recipes/base_recipe.py and components/training/step_scheduler.py): `step` in `step_scheduler.pt`
  of a step, which counts the updates that were made, where the directory's name has one fewer
- PyTorch Lightning (2.6, strategies/fsdp.py and model_parallel.py): `global_step` in `meta.pt` beside the pieces.
  Lightning Fabric has a file of that name too, with what a program chose, and without Lightning's version
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from precisionctl.checkpoints.dcp import olmo_core
from precisionctl.checkpoints.other_trainers.trainer_run import number
from precisionctl.checkpoints.other_trainers.trainer_trees import AUTOMODEL
from precisionctl.checkpoints.torch_files import torch_zip
from precisionctl.errors import DamagedCheckpoint, UnsafePickle
from precisionctl.paths import above, own_name
from precisionctl.sizes import size
from precisionctl.untrusted.safe_files import has_file

_META = "meta.pt"
"""Lightning's file, or one of any other program's; the other files are their trainers'."""

_OF_LIGHTNING = "pytorch-lightning_version"

_LARGEST = 4 << 20
"""Most bytes of such a file that is read: they have kilobytes, OLMo-core's the state of its loader, too."""


@dataclass(frozen=True)
class SavedStep:
    """The `step` that a trainer has saved; None where there is none. `unread` says in words why a file that may have
    one was not read: it holds more than a step, and perhaps objects of a program's own classes."""

    step: int | None = None
    unread: str = ""


def saved_step(directory: Path) -> SavedStep:
    """The step beside the model in a `directory`. Raises DamagedCheckpoint for a trainer's file that is no archive of
    torch.save."""
    for root, name, key in _places(directory):
        file = root / name
        if not has_file(file, root):
            continue
        if file.stat().st_size > _LARGEST:
            return SavedStep(unread=f"{name} was not read: it is larger than {size(_LARGEST)}")
        try:
            saved = torch_zip.skeleton(file)
        except UnsafePickle as error:
            return SavedStep(unread=f"{name} was not read: {error.what}")
        except DamagedCheckpoint:
            if name != _META:
                raise
            continue
        if isinstance(saved, dict) and key in saved and (name != _META or _OF_LIGHTNING in saved):
            try:
                return SavedStep(number(saved[key], file))
            except DamagedCheckpoint:
                return SavedStep(unread=f"`{key}` in {name} is no plain number")
    return SavedStep()


def _places(directory: Path) -> Iterator[tuple[Path, str, str]]:
    """The directories and files that may have a step, and its key."""
    if own_name(directory) == olmo_core.DIRECTORY:
        yield above(directory), "train/rank0.pt", "global_step"
    if own_name(directory) == AUTOMODEL:
        yield above(directory), "step_scheduler.pt", "step"
    yield directory, _META, "global_step"
