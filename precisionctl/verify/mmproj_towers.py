"""The towers of a wrapper beside those of llama.cpp's second file, `mmproj`, in the folder of a GGUF file."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from precisionctl.architectures.read_off import rows
from precisionctl.architectures.wrappers import TOWERS
from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.gguf.reader import GgufReader
from precisionctl.checkpoints.gguf.towers import tower_of
from precisionctl.checkpoints.gguf.towers.mmproj_file import MmprojFile
from precisionctl.errors import UnknownArchitecture
from precisionctl.planning.plan import Job, Plan
from precisionctl.verify.hf_tensors import HfTensors


@dataclass(frozen=True)
class TowersOfBoth:
    """The towers of A and of B by the wrapper's names, and a line for each setting in which they differ. `file` is "A"
    or "B", `others` are tensors of the file that are none of the wrapper's, with their dtypes, and `unread` those of
    the wrapper that no file has, as no token is computed with them."""

    a: HfTensors
    b: HfTensors
    file: str
    settings: tuple[str, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()


def towers_of_both(a: Reader, b: Reader) -> TowersOfBoth | None:
    """The towers of a wrapper, and of the file beside a GGUF file. None where there are not both, or the wrapper's are
    not as llama.cpp has them. Raises as `MmprojFile`, but for that."""
    if isinstance(b, GgufReader) and b.mmproj and a.model.wrapper:
        mine, others = a, b
    elif isinstance(a, GgufReader) and a.mmproj and b.model.wrapper:
        mine, others = b, a
    else:
        return None
    plan = HfTensors(mine).plan.towers
    assert others.mmproj is not None
    try:
        tower = tower_of(mine.model, mine.companions)
        file = MmprojFile(others.mmproj, tower, plan.targets, mine.model)
    except UnknownArchitecture:
        return None
    computed = tower.tensors(plan.targets)
    unread = tuple(name for name in plan.targets if name not in computed)
    jobs = tuple(job for job in plan.jobs if job.writes[0] in computed)
    plan = replace(plan, jobs=jobs, targets={name: plan.targets[name] for name in computed})
    read = tuple(Job(TOWERS + row.hf[0], row, row.hf, row.hf) for row in rows(file.specs))
    # of a Reader, these use tensors alone
    of_file = HfTensors(cast(Reader, file), Plan(mine.model, "hf", "hf", read, file.specs))
    sides = (HfTensors(mine, plan), of_file) if mine is a else (of_file, HfTensors(mine, plan))
    name = "B" if mine is a else "A"
    lines = (
        f"{key} is {said} in {name}, and {wanted} by the other's config.json" for key, said, wanted in file.otherwise
    )
    return TowersOfBoth(*sides, name, tuple(lines), file.others, unread)
