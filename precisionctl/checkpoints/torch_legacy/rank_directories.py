"""The directories of Megatron's `torch` checkpoints: `mp_rank_TT[_PPP][_EEE]`, one for each rank that saved.

TT, PPP and EEE are the tensor, pipeline and expert rank (megatron/training/checkpointing.py, get_checkpoint_name). The
last two are left out where there is only one such rank, so `mp_rank_00_001` can mean either; the arguments saved inside
decide.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.torch_files import torch_zip
from precisionctl.errors import DamagedCheckpoint, shown
from precisionctl.param import Parallelism
from precisionctl.untrusted.safe_files import check_file

FILE = "model_optim_rng.pt"
_MOST_RANKS = 1 << 16
_NAME = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")


@dataclass(frozen=True)
class Rank:
    """A rank's place, its file, and what it saved, with LocatedTensor in place of tensors (`torch_zip.skeleton`)."""

    tensor: int
    pipeline: int
    expert: int
    path: Path
    content: Mapping[str, Any]

    @property
    def chunks(self) -> list[Mapping[str, Any]]:
        """The state dicts of the rank's pipeline stages: `model`, or `model0`, `model1`, ... if there are several.

        Raises DamagedCheckpoint if there is none.
        """
        names = ["model"] if "model" in self.content else []
        while not names or (names[-1] != "model" and f"model{len(names)}" in self.content):
            names.append(f"model{len(names)}")
        found = [self.content.get(name) for name in names]
        if not all(isinstance(chunk, dict) for chunk in found):
            raise DamagedCheckpoint("it holds no model", where=self.path, do="Is the copy whole?")
        return found  # type: ignore[return-value]


def is_legacy(path: Path) -> bool:
    """Whether `path` is the directory of an iteration in this container."""
    return any(_NAME.fullmatch(file.parent.name) for file in path.glob(f"mp_rank_*/{FILE}"))


def rank_directory(tensor: int, pipeline: int, expert: int, sizes: Parallelism) -> str:
    """The name of a rank's directory in a run of these sizes."""
    name = f"mp_rank_{tensor:02d}"
    name += f"_{pipeline:03d}" if sizes.pipeline > 1 else ""
    return name + (f"_{expert:03d}" if sizes.expert > 1 else "")


def places(sizes: Parallelism) -> list[tuple[int, int, int]]:
    """The (tensor, pipeline, expert) ranks for which a run of these sizes has directories.

    Expert layers have their own order of ranks, `expert_tensor` fastest (megatron/core/parallel_state.py,
    RankGenerator). If `expert_tensor` differs from `tensor`, not every pair of tensor and expert rank exists.
    """
    of_experts, ranks = sizes.tensor_of(experts=True), range(sizes.ranks // sizes.pipeline)
    pairs = sorted({(rank % sizes.tensor, rank // of_experts % sizes.expert) for rank in ranks})
    return [(tensor, stage, expert) for tensor, expert in pairs for stage in range(sizes.pipeline)]


def read_ranks(path: Path) -> tuple[Parallelism, list[Rank]]:
    """The sizes of the run that saved `path`, and all its ranks in the order of `places`. Reads no tensors.

    Raises DamagedCheckpoint where a directory is missing or surplus or a file cannot be read, UnsafePickle for one that
    asks for anything but Megatron's classes.
    """
    matches = {entry.name: _NAME.fullmatch(entry.name) for entry in path.iterdir() if entry.is_dir()}
    found = {name: tuple(int(n) for n in match.groups() if n) for name, match in matches.items() if match}
    first = min(found)
    content = _content(path / first / FILE)
    args = arguments(content)
    tensor = 1 + max(numbers[0] for numbers in found.values())
    pipeline, expert = (_size(args, f"{kind}_model_parallel_size", path) for kind in ("pipeline", "expert"))
    virtual = _size(args, "virtual_pipeline_model_parallel_size", path)
    of_experts = _size(args, "expert_tensor_parallel_size", path, tensor)
    saved = _size(args, "tensor_model_parallel_size", path, tensor)
    if tensor != saved:
        what = f"directories of {tensor} tensor-parallel ranks, its arguments say {saved}"
        raise DamagedCheckpoint(what, where=path, do="Copy the checkpoint again, from every machine that saved.")
    sizes = Parallelism(tensor, pipeline, virtual, expert, None if of_experts == tensor else of_experts)
    if sizes.ranks > _MOST_RANKS:
        raise DamagedCheckpoint(f"its arguments ask for more ranks than there are: {sizes}", where=path / first)

    expected = {rank_directory(*place, sizes): place for place in places(sizes)}
    missing = sorted(expected.keys() - found.keys())
    if missing:
        what = f"the directory {missing[0]} is missing ({len(missing)} of {len(expected)} ranks)"
        raise DamagedCheckpoint(what, where=path, do="Copy the checkpoint again, from every machine that saved.")
    surplus = sorted(found.keys() - expected.keys())
    if surplus:
        ranks = f"tensor {sizes.tensor} x pipeline {sizes.pipeline} x expert {sizes.expert} ranks"
        what = f"{surplus[0]} is not a rank of a run of {ranks}"
        raise DamagedCheckpoint(what, where=path, do="Is it left over from another run? Move it away.")
    return sizes, [
        Rank(*place, path / name / FILE, content if name == first else _content(path / name / FILE))
        for name, place in expected.items()
    ]


def arguments(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Megatron's arguments (`args`) in what a rank saved; empty if there are none."""
    args = content.get("args")
    return vars(args) if isinstance(args, argparse.Namespace) else {}


def _content(path: Path) -> Mapping[str, Any]:
    check_file(path, path.parent.parent)
    content = torch_zip.skeleton(path)
    if not isinstance(content, dict):
        raise DamagedCheckpoint("it holds no table", where=path)
    return content


def _size(args: Mapping[str, Any], name: str, path: Path, default: int = 1) -> int:
    size = args.get(name)
    if size is None:
        return default
    if type(size) is not int or not 1 <= size <= 1 << 20:
        raise DamagedCheckpoint(f"{name} is {shown(size)}, not a number of ranks", where=path)
    return size
