"""The towers of a wrapper beside those of llama.cpp's second file, `mmproj`, in the folder of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.gguf.reader import GgufReader
from precisionctl.checkpoints.gguf.towers import tower_of
from precisionctl.checkpoints.gguf.towers.mmproj_file import MmprojFile
from precisionctl.errors import UnknownArchitecture
from precisionctl.export.gguf.towers_plan import token_embedding
from precisionctl.planning.plan import Plan
from precisionctl.torch_when_used import torch
from precisionctl.verify.hf_tensors import HfTensors


@dataclass(frozen=True)
class TowersOfBoth:
    """The towers of A and of B by the wrapper's names, and a line for each setting in which they differ. `file` is "A"
    or "B", `others` are tensors of the file that are none of the wrapper's, with their dtypes, and `unread` those of
    the wrapper that no file has, as no token is computed with them, and further files."""

    a: HfTensors
    b: HfTensors
    file: str
    settings: tuple[str, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()


def mmproj_of(reader: Reader) -> Sequence[Path]:
    """The files of towers beside a GGUF file."""
    return reader.mmproj if isinstance(reader, GgufReader) else ()


def towers_of_both(a: Reader, b: Reader, plans: tuple[Plan, Plan]) -> TowersOfBoth | None:
    """The towers of a wrapper, and of the file beside a GGUF file. `plans` are of all tensors of both, in Hugging
    Face's layout. None where there are not both, or the wrapper's are not as llama.cpp has them. Raises as
    `MmprojFile`, but for that."""
    mine, others, whole = (a, b, plans[0]) if mmproj_of(b) else (b, a, plans[1])
    if not (files := mmproj_of(others)) or mine.model.wrapper is None:
        return None
    plan = whole.towers
    try:
        tower = tower_of(mine.model, mine.companions)
        file = MmprojFile(files[0], tower, plan.targets, mine.model)
    except UnknownArchitecture:
        return None
    computed = tower.tensors(plan.targets)
    unread = (name for name in plan.targets if name not in computed)
    jobs = tuple(job for job in plan.jobs if job.writes[0] in computed)
    plan = replace(plan, jobs=jobs, targets={name: plan.targets[name] for name in computed})
    of_file = HfTensors.as_stored(file, mine.model, file.specs)
    sides = (HfTensors(mine, plan), of_file) if mine is a else (of_file, HfTensors(mine, plan))
    name = "B" if mine is a else "A"
    lines = [
        f"{key} is {said} in {name}, and {wanted} by the other's config.json" for key, said, wanted in file.otherwise
    ]
    if tower.token:
        (copy, token), wanted = tower.token, token_embedding(whole, mine, tower.token[1])
        found = file.vector(copy, len(wanted))
        if found is None or not torch.equal(found, wanted):
            lines.append(f"{copy} of {name} is not the embedding of token {token}")
    return TowersOfBoth(*sides, name, tuple(lines), file.others, (*unread, *(other.name for other in files[1:])))
