"""DeepSpeed's own checkpoints, as its ranks save them (read off 0.19.8 and its utils/zero_to_fp32.py).

A directory such as `global_step100` has, for each data-parallel rank R,
`[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt` with flat FP32 masters and moments, one for each group of parameters;
and model states, which list the parameters and their shapes in the order of the flat tensors.

- ZeRO 1 and 2, and the BF16 optimizer: `mp_rank_00_model_states.pt`. Each group is one flat tensor of its parameters,
  perhaps each with padding (`param_alignment_paddings`). It is cut into equal parts for the ranks, also within a
  parameter; padding at the end may be missing. (`param_slice_mappings` says so too, but is wrong with
  `round_robin_gradients`.) Frozen parameters are only in `module`, in the model's dtype.
- ZeRO 3: `zero_pp_rank_R_mp_rank_00_model_states.pt`, whose `module` is empty. Each parameter is dealt out to all ranks
  (ceil(elements / ranks) for each, padded), and a rank's pieces stand one after the other. Frozen ones are dealt out in
  the same way in `frozen_param_fragments`.
- Without ZeRO: `mp_rank_00_model_states.pt` alone, with an optimizer whose parameters have numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.deepspeed.states import (
    BASE_OPTIMIZER_STATE,
    SAVE_IT_WHOLE,
    WHAT,
    ModelStates,
    check_masters,
    counts_of_updates,
    dealt_frozen,
    is_flat,
    plain_groups,
    rank_files,
    read_states,
    whole_tensor,
)
from precisionctl.checkpoints.other_trainers.flat import Dealt, EndToEnd, FlatSlice, FlatTensor
from precisionctl.checkpoints.other_trainers.numbered_optimizer import names_by_number
from precisionctl.checkpoints.other_trainers.saved_states import SavedStates, first_names
from precisionctl.checkpoints.other_trainers.trainer_run import different_counts, not_adams, number, stored_group
from precisionctl.dtypes import DType
from precisionctl.errors import CheckpointError, DamagedCheckpoint, damage, shown
from precisionctl.param import MOMENTS, TensorSpec
from precisionctl.sizes import counted

_PARAM = "param"
_VALUES = (DType.float32, DType.bfloat16, DType.float16)


def read_zero(directory: Path) -> SavedStates:
    """What the files of all ranks hold.

    Raises DamagedCheckpoint where ranks are missing or files contradict one another, UnsafePickle, and CheckpointError
    for a checkpoint cut for tensor or pipeline parallelism, or for ranks of experts.
    """
    model, optimizer = rank_files(directory)
    states = ModelStates(model[0])
    if not optimizer:
        return _without_zero(states)
    contents = [_RankStates(path) for path in optimizer]
    ranks = len(contents)
    stage, said_ranks = contents[0].stage, list[Any]()
    for rank in contents:
        said_ranks += rank.said_ranks if isinstance(rank.said_ranks, list) else [rank.said_ranks]
    if any(rank.stage != stage for rank in contents) or any(count not in (None, ranks) for count in said_ranks):
        what = f"files of {counted(ranks, 'rank')}, which say {shown(contents[0].said_ranks)} ranks and ZeRO {stage}"
        raise DamagedCheckpoint(what, where=directory, do="Is the copy whole?")
    found: dict[str, dict[str, FlatTensor]] = {}
    for kind in (_PARAM, *contents[0].moments):
        for rank in contents:
            if kind not in (_PARAM, *rank.moments) or rank.dtype(kind) != contents[0].dtype(kind):
                what = f"its optimizer has no {kind}, or of another dtype than other ranks'"
                raise DamagedCheckpoint(what, where=rank.path)
        found[kind] = (_dealt if stage == 3 else _joined)(contents, kind, states, directory)
    check_masters(found[_PARAM], states)
    weights = states.stored(states.shapes)
    if stage == 3:
        weights |= dealt_frozen(states, model, directory)
    weights |= found.pop(_PARAM)

    unread = contents[0].unsupported_state
    counts = {rank.path: made for rank in contents if found and (made := rank.updates)}  # of ranks that have any
    updates = next(iter(counts.values()), set[int]())
    if other := [path for path, made in counts.items() if made != updates]:
        what = "its optimizer made other numbers of updates than other ranks'"
        raise DamagedCheckpoint(what, where=other[0], do="Is each file of this checkpoint?")
    if len(updates) > 1:
        found, unread = {}, " and ".join(filter(None, (unread, different_counts(updates))))

    groups = contents[0].groups
    shapes = states.groups if len(states.groups) == len(groups) else [None] * len(groups)
    return SavedStates(
        states.with_shared(weights),
        [*model, *optimizer],
        states.global_steps,
        moments=found,
        updates=next(iter(updates), None) if found else None,
        groups=[stored_group(group, contents[0].path, of) for group, of in zip(groups, shapes, strict=True)],
        unsupported_state=unread,
    )


class _RankStates:
    """A rank's file of the optimizer: `flat` tensors by kind, one for each group of parameters."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with damage(WHAT, path):
            content = read_states(path)["optimizer_state_dict"]
            # The BF16 optimizer names no stage; it stores as ZeRO 1 does
            self.stage = number(content.get("zero_stage", 1), path)
            if self.stage not in (1, 2, 3):
                raise ValueError(f"ZeRO {self.stage}")
            self.said_ranks = content.get("partition_count")
            partitions = content.get("ds_zero_partition_groups")
            if partitions and any(group.get("partition_count") != self.said_ranks for group in partitions):
                raise CheckpointError("groups of ranks of their own for some parameters", where=path, do=SAVE_IT_WHOLE)
            self.paddings = content.get("param_alignment_paddings")
            base = content["optimizer_state_dict" if self.stage == 3 else BASE_OPTIMIZER_STATE]
            self._states = list(base["state"].values() if isinstance(base, dict) else base)
            numbers = list(base["state"]) if isinstance(base, dict) else list(range(len(base)))
            if numbers != list(range(len(numbers))):
                raise ValueError(f"states of groups {shown(numbers)}")
            self.groups = plain_groups(base.get("param_groups") if isinstance(base, dict) else None)
            masters = content["fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"]
            self.flat = {_PARAM: list(masters)}
            kinds = list(dict.fromkeys(key for state in self._states for key, one in state.items() if is_flat(one)))
            self.moments = [kind for kind in MOMENTS if kind in kinds]
            if len(self.moments) < len(MOMENTS):
                self.moments = []
            others = [kind for kind in kinds if kind not in self.moments]
            self.unsupported_state = f"{shown(others)}, which AdamW has not" if others else ""
            self.flat |= {kind: [state.get(kind) for state in self._states] for kind in self.moments}
            for kind, parts in self.flat.items():
                if len(parts) != len(masters) or not all(is_flat(one) for one in parts):
                    raise ValueError(f"{kind} is not flat, or not of all {len(masters)} groups")
                if any(one.dtype not in _VALUES or one.dtype != parts[0].dtype for one in parts):
                    raise ValueError(f"{kind} of dtypes that no optimizer has, or of several")

    def dtype(self, kind: str) -> DType:
        """That of all groups."""
        return self.flat[kind][0].dtype if self.flat[kind] else DType.float32

    @property
    def counts(self) -> list[int]:
        """Elements of the masters of each group."""
        return [one.shape[0] for one in self.flat[_PARAM]]

    @property
    def updates(self) -> set[int]:
        """AdamW's counts of updates."""
        return counts_of_updates(self._states, self.groups, self.path)


def _joined(contents: Sequence[_RankStates], kind: str, states: ModelStates, where: Path) -> dict[str, FlatTensor]:
    """ZeRO 1 and 2: each group's parameters one after the other, over all ranks."""
    found: dict[str, FlatTensor] = {}
    if any(len(rank.counts) != len(states.groups) for rank in contents):
        raise DamagedCheckpoint(f"flat tensors of other groups than the {len(states.groups)} of the model", where=where)
    for group, shapes in enumerate(states.groups):
        counts = [rank.counts[group] for rank in contents]
        for rank, count in zip(contents, counts, strict=True):
            longer = rank.flat[kind][group].shape[0]
            if longer < count or (longer > count and rank is not contents[-1]):
                raise DamagedCheckpoint(f"{kind} of {longer} elements for {count} masters", where=rank.path)
        whole = EndToEnd([(rank.path, rank.flat[kind][group]) for rank in contents], counts)
        paddings, start, first = [0] * len(shapes), 0, contents[0]
        if first.paddings is not None:
            with damage(WHAT, first.path):
                paddings = [number(one, first.path) for one in first.paddings[group]]
                if len(paddings) != len(shapes):
                    raise ValueError(f"{len(paddings)} paddings for {len(shapes)} parameters")
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            found[name] = FlatTensor(TensorSpec(shape, contents[0].dtype(kind)), FlatSlice(whole, start))
            start += math.prod(shape) + padding
        # DeepSpeed fills the last rank up to a multiple of twice the number of ranks, and may leave that out
        if not start - (paddings[-1] if paddings else 0) <= whole.count < start + 2 * len(contents):
            what = f"the ranks have {whole.count} elements of group {group}, its parameters {start}"
            raise DamagedCheckpoint(what, where=where, do="Is the copy whole?")
    return found


def _dealt(contents: Sequence[_RankStates], kind: str, states: ModelStates, where: Path) -> dict[str, FlatTensor]:
    """ZeRO 3: each parameter dealt out to the ranks; a rank has the pieces of all one after the other."""
    ranks: list[EndToEnd] = []
    for rank in contents:
        if rank.counts != contents[0].counts or [one.shape[0] for one in rank.flat[kind]] != rank.counts:
            raise DamagedCheckpoint(f"flat tensors of {kind} of other lengths than other ranks'", where=rank.path)
        ranks.append(EndToEnd([(rank.path, one) for one in rank.flat[kind]], rank.counts))
    found, start = {}, 0
    for name, shape in states.shapes.items():
        each = -(-math.prod(shape) // len(contents))
        found[name] = FlatTensor(TensorSpec(shape, contents[0].dtype(kind)), Dealt(ranks, start, each))
        start += each
    if start != ranks[0].count:
        what = f"a rank has {ranks[0].count} elements, the model's parameters would have {start}"
        raise DamagedCheckpoint(what, where=where, do="Is the copy whole?")
    return found


def _without_zero(states: ModelStates) -> SavedStates:
    """Without ZeRO the model is whole, in the dtype that it computes in. The optimizer is torch's, or DeepSpeed's
    around it with masters (`FP16_UnfusedOptimizer`, for BF16 too); its numbers are those of the parameters in the order
    of the model."""
    path, stored = states.path, states.stored(())
    if any(name not in stored for name in states.shapes):
        what = "its parameters are in the optimizer's files (*_optim_states.pt), which are missing"
        raise DamagedCheckpoint(what, where=path, do="Copy the checkpoint again.")
    saved = SavedStates(states.with_shared(stored), [path], states.global_steps)
    outer = states.content.get("optimizer")
    if not outer:
        return saved
    with damage(WHAT, path):
        inner = outer.get("optimizer_state_dict", outer)
        if "fp32_groups_flat" in outer or not {"state", "param_groups"} <= inner.keys():
            return replace(saved, unsupported_state="it is flat, without the names of its parameters")
        if others := not_adams(kind for state in inner["state"].values() for kind in state):
            return replace(saved, unsupported_state=others)
        firsts = first_names({name: states.module[name] for name in stored})
        buffers = {*states.shared, *states.content.get("buffer_names", ())}
        names = [name for name in dict.fromkeys(firsts.values()) if name not in buffers]
        groups = plain_groups(inner["param_groups"])
        try:
            named = names_by_number(groups, names, path)
        except CheckpointError as error:
            return replace(saved, unsupported_state=error.what)
        found: dict[str, dict[str, FlatTensor]] = {kind: {} for kind in (_PARAM, *MOMENTS)}
        for group, masters in zip(groups, outer.get("fp32_groups", ()), strict=False):
            for index, master in zip(group["params"], masters, strict=True):
                found[_PARAM][named[index]] = whole_tensor(path, master, named[index])
        for index, state in inner["state"].items():
            for kind in MOMENTS:
                found[kind][named[index]] = whole_tensor(path, state[kind], named[index])
        for kind, tensors in found.items():
            for name, tensor in tensors.items():
                if tensor.spec.shape != stored[name].spec.shape:
                    raise DamagedCheckpoint(f"{kind} of `{name}` is not of its shape", where=path)
        updates = set[int]()
        for group in groups:
            counts = [
                number(inner["state"][index]["step"], path) for index in group["params"] if index in inner["state"]
            ]
            # FusedAdam counts in the last one that has a gradient, for all of the group; the others' stay at the 0 that
            # the group has, too (`step` in ops/adam/fused_adam.py)
            updates |= set(counts[-1:] if group.get("step") == 0 and not any(counts[:-1]) else counts)
    if len(updates) > 1:
        return replace(saved, unsupported_state=different_counts(updates))
    masters = found.pop(_PARAM)
    check_masters(masters, states)
    weights = stored | {name: masters[first] for name, first in firsts.items() if first in masters}
    saved = replace(saved, weights=states.with_shared(weights))
    if not updates:
        return saved  # it has made none
    settings = [stored_group(group, path) for group in groups if group["params"]]
    return replace(saved, moments=found, updates=updates.pop(), groups=settings)
