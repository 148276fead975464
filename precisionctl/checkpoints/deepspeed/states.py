"""The contents of DeepSpeed's files, checked: the model states of a rank, and everything in a checkpoint."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from precisionctl.checkpoints.chunks import read_rows
from precisionctl.checkpoints.other_trainers.flat import Dealt, EndToEnd, FlatTensor, FlatTensors
from precisionctl.checkpoints.other_trainers.trainer_run import number
from precisionctl.checkpoints.torch_dist.masters import check_differing
from precisionctl.checkpoints.torch_files.torch_zip import LocatedTensor, contiguous, skeleton
from precisionctl.errors import CheckpointError, DamagedCheckpoint, damage, shown
from precisionctl.param import TensorSpec
from precisionctl.untrusted.safe_files import check_file
from precisionctl.untrusted.safe_pickle import is_count, sizes

WHAT = "not what DeepSpeed writes"
BASE_OPTIMIZER_STATE = "base_optimizer_state"
"""In a rank's file of ZeRO 1 and 2 the optimizer that DeepSpeed wraps. In a universal checkpoint DeepSpeed 0.19.8 does
not read it (runtime/base_optimizer.py, runtime/zero/stage3.py), nor does its tool leave it there (ds_to_universal.py):
so settings that it is not to load travel there."""
SAVE_IT_WHOLE = "Save the model as Hugging Face's from the trainer that made it, and give that."

_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,4})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,4})_optim_states\.pt")
_PARTS = re.compile(r"layer_\d+[-_].+\.pt|expert_.+\.pt|expp_rank_.+\.pt")
"""Files of pipeline stages and of experts."""


def has_model_states(directory: Path) -> bool:
    """Whether a directory has DeepSpeed's model states."""
    return directory.is_dir() and any(_MODEL.fullmatch(one.name) for one in directory.glob("*_model_states.pt"))


def rank_files(directory: Path, *, either: bool = False) -> tuple[list[Path], list[Path]]:
    """The files of model states and of optimizer states, each in the order of ranks. With `either`, files of ZeRO 1 and
    2 may be beside those of ZeRO 3; then the former are used.

    Raises CheckpointError for a checkpoint cut for tensor, pipeline or expert parallelism, and DamagedCheckpoint if
    ranks are missing.
    """
    names = sorted(one.name for one in directory.iterdir())
    if parts := [name for name in names if _PARTS.fullmatch(name)]:
        what = f"a checkpoint of DeepSpeed cut for pipeline or expert parallelism ({parts[0]})"
        raise CheckpointError(what, where=directory, do=SAVE_IT_WHOLE)
    found: list[list[Path]] = []
    for pattern in (_MODEL, _OPTIMIZER):
        matches = [match for name in names if (match := pattern.fullmatch(name))]
        if cut := [match[0] for match in matches if int(match[2])]:
            what = f"a checkpoint of DeepSpeed cut for tensor parallelism ({cut[0]})"
            raise CheckpointError(what, where=directory, do=SAVE_IT_WHOLE)
        if either and any(match[1] is None for match in matches):
            matches = [match for match in matches if match[1] is None]
        by_rank = sorted((int(match[1] or 0), match[0]) for match in matches)
        if [rank for rank, _ in by_rank] != list(range(len(by_rank))):
            what = f"files of ranks {shown([rank for rank, _ in by_rank])}, where each should be once"
            raise DamagedCheckpoint(what, where=directory, do="Is the copy whole? Remove files of other runs.")
        found.append([directory / name for _, name in by_rank])
    return found[0], found[1]


def read_states(path: Path) -> Mapping[str, Any]:
    """The object of a file, with tensors located. Raises DamagedCheckpoint for one that is missing or no table."""
    check_file(path, path.parent)
    found = skeleton(path)
    if not isinstance(found, Mapping):
        raise DamagedCheckpoint(f"{WHAT}: {shown(found)}", where=path)
    return found


class ModelStates:
    """A rank's `*_model_states.pt`: the model, and the names and shapes of the parameters in the optimizer's flat
    tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = read_states(path)
        if "ds_autoep_layers" in self.content or self.content.get("num_experts") not in (None, []):
            raise CheckpointError(
                "experts that DeepSpeed has distributed over ranks (its MoE layers, or AutoEP)", where=path, do=_EXPERTS
            )
        with damage(WHAT, path):
            self.module = {_name(name): one for name, one in self.content["module"].items()}
            groups = self.content.get("param_shapes") or []
            self.groups = [_shapes(group) for group in groups]
            self.shapes = {name: shape for group in self.groups for name, shape in group.items()}
            if len(self.shapes) < sum(map(len, self.groups)):
                raise ValueError("two groups have a parameter of one name")
            self.frozen = _shapes(self.content.get("frozen_param_shapes") or {})
            self.shared = {_name(a): _name(b) for a, b in (self.content.get("shared_params") or {}).items()}

    @cached_property
    def global_steps(self) -> int | None:
        """Steps of training."""
        steps = self.content.get("global_steps")
        if steps is not None and not is_count(steps):
            raise DamagedCheckpoint(f"{shown(steps)} steps", where=self.path)
        return steps

    def stored(self, but: Collection[str]) -> dict[str, FlatTensor]:
        """The model's own tensors, but for those of these names; in ZeRO 3 it has elements of buffers alone."""
        names = [name for name, one in self.module.items() if name not in but and not is_empty(one)]
        return {name: whole_tensor(self.path, self.module[name], name) for name in names}

    def with_shared(self, tensors: Mapping[str, FlatTensor]) -> dict[str, FlatTensor]:
        """These tensors, and the same ones under the names of parameters that share them. Raises DamagedCheckpoint if a
        shared tensor is missing."""
        lost = [of for of in self.shared.values() if of not in tensors]
        if lost:
            raise DamagedCheckpoint(f"`{lost[0]}`, which others share, is missing", where=self.path)
        return {**tensors, **{name: tensors[of] for name, of in self.shared.items()}}


def dealt_frozen(first: ModelStates, paths: Sequence[Path], where: Path) -> dict[str, FlatTensor]:
    """The frozen parameters of ZeRO 3, put together from the pieces in all ranks' model states (`paths`)."""
    ranks = [first, *(ModelStates(path) for path in paths[1:])] if first.frozen else []
    found = {}
    for name, shape in first.frozen.items():
        each, parts, dtypes = -(-math.prod(shape) // len(ranks)), list[EndToEnd](), set()
        for rank in ranks:
            with damage(WHAT, rank.path):
                part = rank.content["frozen_param_fragments"][name]
                if not is_flat(part) or part.shape[0] != each:
                    raise ValueError(f"{shown(part)} of frozen `{name}`")
                dtypes.add(part.dtype)
                parts.append(EndToEnd([(rank.path, part)], [each]))
        if len(dtypes) != 1:
            raise DamagedCheckpoint(f"pieces of frozen `{name}` of two dtypes", where=where)
        found[name] = FlatTensor(TensorSpec(shape, dtypes.pop()), Dealt(parts, 0, each))
    return found


_COMPARED = 64
"""Elements of each tensor that are compared; at least one row."""


def check_masters(masters: Mapping[str, FlatTensor], states: ModelStates, *, all_of_them: bool = False) -> None:
    """Raise DamagedCheckpoint unless FP32 masters have the shapes of the model's weights and most of them, or all,
    begin like these when rounded. Nothing else would show that a flat tensor has its parameters in another order. ZeRO
    3 stores no weights."""
    names = [name for name, one in states.module.items() if name in masters and not is_empty(one)]
    weights = FlatTensors({name: whole_tensor(states.path, states.module[name], name) for name in names})
    flat, differing = FlatTensors(masters), []
    for name in names:
        spec = flat.specs[name]
        rows = min(spec.rows, max(1, _COMPARED // spec.columns))
        if weights.specs[name].shape != spec.shape:
            raise DamagedCheckpoint(
                f"`{name}` is {list(weights.specs[name].shape)}, not {list(spec.shape)}", where=states.path
            )
        weight = read_rows(weights, name, 0, rows)
        rounded = read_rows(flat, name, 0, rows).to(weight.dtype)
        if not bool(((rounded == weight) | (rounded.isnan() & weight.isnan())).all()):
            differing.append(name)
    do = "Are these files of one checkpoint?"
    check_differing(differing, len(names), states.path, do, all_of_them=all_of_them)


def is_flat(value: object) -> TypeGuard[LocatedTensor]:
    """Whether something is a located tensor of one dimension."""
    return isinstance(value, LocatedTensor) and len(value.shape) == 1


def whole_tensor(path: Path, located: object, name: str) -> FlatTensor:
    """A tensor of a file. Raises as `contiguous`."""
    found = contiguous(located, name, path)
    return FlatTensor(TensorSpec(found.shape, found.dtype), EndToEnd([(path, found)], [math.prod(found.shape)]))


def plain_groups(groups: object) -> list[Mapping[str, Any]]:
    """The settings of an optimizer's groups of parameters."""
    return [one for one in groups if isinstance(one, dict)] if isinstance(groups, list) else []


def counts_of_updates(states: Iterable[Mapping[str, Any]], groups: Iterable[Mapping[str, Any]], path: Path) -> set[int]:
    """AdamW's counts of updates in a file: those of its `states`, or of its `groups` if no state has one. DeepSpeed's
    FusedAdam counts in states, and leaves a 0 in groups (ops/adam/fused_adam.py)."""
    of_states, of_groups = ([one["step"] for one in each if one.get("step") is not None] for each in (states, groups))
    return {number(step, path) for step in of_states or of_groups}


def _shapes(group: Any) -> dict[str, tuple[int, ...]]:
    found = {_name(name): sizes(shape) for name, shape in group.items()}
    if empty := [name for name, shape in found.items() if 0 in shape]:
        raise ValueError(f"`{empty[0]}` has no elements")
    return found


def _name(name: Any) -> str:
    if type(name) is not str or not name:
        raise ValueError(f"{shown(name)} as a name")
    return name


def is_empty(located: object) -> bool:
    """Whether something is a located tensor without elements, which stands for one that is elsewhere."""
    return isinstance(located, LocatedTensor) and 0 in located.shape


_EXPERTS = (
    "They are not read: which rank has which expert is not settled in the format. Save the model as Hugging Face's "
    "(`save_16bit_model`, or by your trainer), and give that."
)
