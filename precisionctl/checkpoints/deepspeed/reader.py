"""DeepSpeed's checkpoints as a Reader: FP32 masters, and AdamW's moments, under Hugging Face's names."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from precisionctl.checkpoints.base import NO_HINTS, Chunk, Container, Hints
from precisionctl.checkpoints.deepspeed.states import SavedStates, has_model_states
from precisionctl.checkpoints.deepspeed.universal import is_universal, read_universal
from precisionctl.checkpoints.deepspeed.zero import read_zero
from precisionctl.checkpoints.flat import FlatTensor, FlatTensors
from precisionctl.checkpoints.fused_experts import MOST_SLICES, is_stack, stored_name
from precisionctl.checkpoints.huggingface import recognise as is_hugging_face
from precisionctl.checkpoints.trainer_directory import TrainerDirectory
from precisionctl.checkpoints.trainer_run import TrainerRun, adam_settings, lost_settings
from precisionctl.errors import CheckpointError, DamagedCheckpoint
from precisionctl.param import STATE, TensorSpec
from precisionctl.untrusted.safe_files import check_link, has_file, read_file

LATEST = ("latest", "latest_universal")
"""Files that name the newest checkpoint of a folder."""


def directory_of(path: Path, iteration: int | None = None) -> Path | None:
    """The directory of a checkpoint's files: a path itself, or the one in it of an iteration, else the one that
    `latest` names. None where there is none."""
    if has_model_states(path) or is_universal(path):
        return path
    names = [f"global_step{iteration}"] if iteration is not None else [_latest(path, name) for name in LATEST]
    folders = [path / name for name in names if name]
    return next((one for one in folders if has_model_states(one) or is_universal(one)), None)


def _latest(path: Path, file: str) -> str | None:
    """What a file says is the newest; it must be in that folder."""
    if not has_file(path / file, path):
        return None
    name = read_file(path / file, path, most=1 << 12).decode(errors="replace").strip()
    return name if name and Path(name).name == name else None


def recognise(path: Path) -> bool:
    """Whether `path` has DeepSpeed's files, or directories of steps in it do. Where the weights of Hugging Face's
    Trainer are beside those, `path` is these weights, and a step has to be named."""
    if not path.is_dir() or is_hugging_face(path):
        return False
    return directory_of(path) is not None or any(map(has_model_states, path.glob("global_step*")))


class DeepSpeedReader(TrainerDirectory):
    """A checkpoint of DeepSpeed. Opening one reads the pickles of all ranks, and no tensors.

    Raises DamagedCheckpoint where files contradict each other, UnsafePickle, and CheckpointError for a checkpoint that
    is cut in a way that is not read.
    """

    def __init__(self, path: Path, iteration: int | None = None, hints: Hints = NO_HINTS) -> None:
        directory = directory_of(path, iteration)
        if directory is None:
            which = "the newest checkpoint" if iteration is None else f"global_step{iteration}"
            do = "Give the directory of a step, such as global_step100."
            raise DamagedCheckpoint(f"{which} is not there", where=path, do=do)
        check_link(directory, path)
        # Of a step's directory config and tokenizer are in the folder of the run
        super().__init__(path, hints, "a checkpoint of DeepSpeed", directory.absolute().parent)
        self._directory = directory
        universal = is_universal(directory)
        self.container = "deepspeed-universal" if universal else "deepspeed"
        self._saved: SavedStates = (read_universal if universal else read_zero)(directory)
        tensors = self._logical(self._saved.weights)
        for kind, moments in self._saved.moments.items():
            tensors |= {f"{STATE}{kind}.{name}": one for name, one in self._logical(moments).items()}
        self._tensors = FlatTensors(tensors)
        specs = self._tensors.specs
        self.specs: Mapping[str, TensorSpec] = {n: spec for n, spec in specs.items() if not n.startswith(STATE)}
        self.optimizer_specs: Mapping[str, TensorSpec] = {n: s for n, s in specs.items() if n.startswith(STATE)}

    def _logical(self, stored: Mapping[str, FlatTensor]) -> dict[str, FlatTensor]:
        """The tensors by name, one for each expert of a stack."""
        stacks = {name for name, one in stored.items() if is_stack(name, one.spec)}
        if sum(stored[name].spec.rows for name in stacks) > MOST_SLICES:
            raise DamagedCheckpoint(f"more than {MOST_SLICES} experts", where=self._directory)
        found: dict[str, FlatTensor] = {}
        for name, one in stored.items():
            if stored_name(name)[1] is not None or name.startswith(STATE):
                raise DamagedCheckpoint(f"`{name}` is named as a part of something else", where=self._directory)
            if name in stacks:
                found |= {f"{name}[{index}]": each for index, each in enumerate(one.slices())}
            else:
                found[name] = one
        return found

    @property
    def unread(self) -> str:
        """What there is of an optimizer that is not AdamW's, or cannot be told by parameter, in words."""
        return self._saved.unread

    @property
    def trainer_run(self) -> TrainerRun:
        """AdamW's count and settings. Raises CheckpointError where nothing says the count."""
        if self._saved.updates is None:
            do = "--drop-optimizer leaves the optimizer behind."
            raise CheckpointError("nothing says how many updates the optimizer made", where=self._directory, do=do)
        left = ("the schedule of learning rates, whose kind is not stored", "loss scaler", "random generators")
        more = ("the order of data", *lost_settings(self._saved.groups))
        return TrainerRun(self._saved.updates, adam_settings(self._saved.groups), (*left, *more))

    @property
    def iteration(self) -> int | None:
        return self._saved.global_steps

    @property
    def files(self) -> Sequence[Path]:
        return self._saved.files

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self._tensors.chunks(name)


CONTAINER = Container(
    recognise,
    DeepSpeedReader,
    "mp_rank_00_model_states.pt, or zero_pp_rank_0_mp_rank_00_model_states.pt, of DeepSpeed, there or in the directory "
    "that `latest` names; zero/*/fp32.pt of a universal one",
)
