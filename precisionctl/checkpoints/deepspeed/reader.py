"""DeepSpeed's checkpoints as a Reader: FP32 masters, and AdamW's moments, under Hugging Face's names."""

import os
from dataclasses import replace
from pathlib import Path

from precisionctl.checkpoints.base import NO_HINTS, Container, Hints
from precisionctl.checkpoints.deepspeed.states import has_model_states
from precisionctl.checkpoints.deepspeed.universal import is_universal, read_universal
from precisionctl.checkpoints.deepspeed.zero import read_zero
from precisionctl.checkpoints.huggingface import recognise as is_hugging_face
from precisionctl.checkpoints.other_trainers.saved_states import SavedStatesReader
from precisionctl.errors import CheckpointError
from precisionctl.paths import above
from precisionctl.untrusted.safe_files import check_link, has_file, read_file

LATEST = ("latest", "latest_universal")
"""Files that name the newest checkpoint of a folder."""


def step_directory(path: Path, iteration: int | None = None) -> Path | None:
    """The directory with a checkpoint's files: in `path` that of `iteration`, its own or a universal one; without one
    `path` itself, or in it the directory that `latest` names. None if there is none."""
    names = list[str]()
    if iteration is not None:
        names = [f"global_step{iteration}", f"global_step{iteration}_universal"]
    elif has_model_states(path) or is_universal(path):
        return path
    else:
        for file in LATEST:
            # in other programs' folders it may be a link to a step, which is nothing of DeepSpeed's
            if not (path / file).is_dir() and has_file(path / file, path):
                name = read_file(path / file, path, most=1 << 12).decode(errors="replace").strip()
                # else it names something outside the folder, or what no file can be called, which is not there either
                if Path(name).name == name != ".." and os.path.lexists(path / name):
                    names.append(name)
    folders = [path / name for name in names]
    return next((one for one in folders if has_model_states(one) or is_universal(one)), None)


def recognise(path: Path) -> bool:
    """Whether `path` has DeepSpeed's files, or has directories of steps with such files. A folder of Hugging Face's
    Trainer also has weights: then it is read as those, and a step must be named to read DeepSpeed's."""
    if not path.is_dir() or is_hugging_face(path):
        return False
    return step_directory(path) is not None or any(map(has_model_states, path.glob("global_step*")))


class DeepSpeedReader(SavedStatesReader):
    """A checkpoint of DeepSpeed. Opening one reads the pickles of all ranks, and of tensors the few rows that
    prove the order of parameters.

    Raises DamagedCheckpoint where files contradict each other, UnsafePickle, and CheckpointError for a checkpoint that
    is cut in a way that is not read.
    """

    def __init__(self, path: Path, iteration: int | None = None, hints: Hints = NO_HINTS) -> None:
        directory = step_directory(path, iteration)
        if directory is None:
            which = "the newest checkpoint" if iteration is None else f"global_step{iteration}"
            do = "Give the directory of a step, such as global_step100."
            if step_directory(path) == path:
                do = "Leave --iteration out: there is only this one."
            raise CheckpointError(f"{which} is not there", where=path, do=do)
        check_link(directory, path)
        universal = is_universal(directory)
        self.container = "deepspeed-universal" if universal else "deepspeed"
        saved = replace((read_universal if universal else read_zero)(directory), left=("loss scaler",))
        # The folder of the run, which has the config and tokenizer if `path` is a step's directory
        super().__init__(path, hints, "a checkpoint of DeepSpeed", directory, saved, above(directory))


CONTAINER = Container(
    recognise,
    DeepSpeedReader,
    "mp_rank_00_model_states.pt, or zero_pp_rank_0_mp_rank_00_model_states.pt, of DeepSpeed, there or in the directory "
    "that `latest` names; zero/*/fp32.pt of a universal one",
)
