"""Checkpoints of trainers that keep a model in pieces by rank, put together: weights and AdamW's moments under Hugging
Face's names, as a Reader."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from precisionctl.checkpoints.base import Hints
from precisionctl.checkpoints.chunks import Chunk
from precisionctl.checkpoints.hf_directory.fused_experts import stacks
from precisionctl.checkpoints.other_trainers.flat import FlatTensor, FlatTensors
from precisionctl.checkpoints.other_trainers.trainer_directory import TrainerDirectory
from precisionctl.checkpoints.other_trainers.trainer_run import NO_COUNT, ParameterGroup, TrainerRun, adam_run
from precisionctl.checkpoints.torch_files.torch_zip import LocatedTensor
from precisionctl.errors import DROP_OPTIMIZER, CheckpointError, DamagedCheckpoint
from precisionctl.param import STATE, TensorSpec, state_name, weights_and_states


@dataclass(frozen=True)
class SavedStates:
    """What a checkpoint holds, under the model's own names.

    `weights` are FP32 masters, except those of frozen parameters and buffers, which have the model's dtype. `moments`
    are AdamW's by kind, of all parameters or of none. `groups` are the parameter groups. In words, `unsupported_state`
    says which other optimizer state there is, and `left` what is not carried over from the run.
    """

    weights: Mapping[str, FlatTensor]
    files: Sequence[Path]
    iteration: int | None = None
    moments: Mapping[str, Mapping[str, FlatTensor]] = field(default_factory=dict)
    updates: int | None = None
    groups: Sequence[ParameterGroup] = ()
    unsupported_state: str = ""
    left: tuple[str, ...] = ()


def first_names(located: Mapping[str, LocatedTensor]) -> dict[str, str]:
    """For each tensor of a file, the first one stored at the same place: itself, or the one that it is tied to."""
    firsts = dict[int, str]()
    return {name: firsts.setdefault(one.offset, name) for name, one in located.items()}


class SavedStatesReader(TrainerDirectory):
    """A Reader of the `saved` states of the checkpoint in `directory`. The other arguments are those of
    TrainerDirectory.

    Raises DamagedCheckpoint if a tensor's name would mean something else here, such as a slice of a stack.
    """

    def __init__(self, path: Path, hints: Hints, what: str, directory: Path, saved: SavedStates, *beside: Path) -> None:
        super().__init__(path, hints, what, *beside)
        for kind, found in saved.moments.items():
            if odd := [name for name, one in found.items() if not one.spec.dtype.is_floating_point]:
                why = f"{kind} of `{odd[0]}` is {found[odd[0]].spec.stored_dtype}, and AdamW's is floating-point"
                saved = replace(saved, moments={}, unsupported_state=why)
                break
        self._directory, self._saved = directory, saved
        tensors = self._logical(saved.weights)
        for kind, moments in saved.moments.items():
            tensors |= {state_name(kind, name): one for name, one in self._logical(moments).items()}
        self._tensors = FlatTensors(tensors)
        self.specs: Mapping[str, TensorSpec]
        self.optimizer_specs: Mapping[str, TensorSpec]
        self.specs, self.optimizer_specs = weights_and_states(self._tensors.specs)

    def _logical(self, stored: Mapping[str, FlatTensor]) -> dict[str, FlatTensor]:
        """The tensors by name, one for each expert of a stack."""
        if posing := [name for name in stored if name.startswith(STATE)]:
            what = f"`{posing[0]}` is named as the optimizer state of another tensor"
            raise DamagedCheckpoint(what, where=self._directory)
        fused = stacks({name: one.spec for name, one in stored.items()}, self._directory)
        found: dict[str, FlatTensor] = {}
        for name, one in stored.items():
            if name in fused:
                found |= {f"{name}[{index}]": each for index, each in enumerate(one.slices())}
            else:
                found[name] = one
        return found

    @property
    def unsupported_state(self) -> str:
        """In words, the optimizer state that is not AdamW's, or whose parameters are not known."""
        return self._saved.unsupported_state

    @property
    def trainer_run(self) -> TrainerRun:
        """AdamW's count and settings. Raises CheckpointError where nothing says the count."""
        if self._saved.updates is None:
            raise CheckpointError(NO_COUNT, where=self._directory, do=DROP_OPTIMIZER)
        return adam_run(self._saved.updates, self._saved.groups, self._directory, *self._saved.left)

    @property
    def iteration(self) -> int | None:
        """The step that the checkpoint names, else Adam's count; None for weights alone."""
        return self._saved.updates if self._saved.iteration is None else self._saved.iteration

    @property
    def files(self) -> Sequence[Path]:
        return self._saved.files

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self._tensors.chunks(name)
