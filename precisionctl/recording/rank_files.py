"""The file of a recording, of one process or of several that each recorded their own part.

Processes exchange nothing: each writes its part beside the file, and the one that finds all parts there merges them. So
the run that is recorded has no collective that is not its own, and nobody waits.
"""

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from precisionctl.checkpoints.output import Output, disk_problems, write_then_rename
from precisionctl.errors import OutputError
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Fp8State, Fp8States, RoleState

_CHOSEN = "merging"
"""A file that the process which merges the parts makes, as only one can."""
_LEFT = re.compile(rf"\d+ of \d+\.safetensors|.+\.new|{_CHOSEN}")
"""Files that a run may have left: parts, and what was being written."""
_EXPERT = re.compile(r"(.+)\[(\d+)\]")
"""As `key_of` writes it."""


def begin(output: Output) -> None:
    """Make way for the parts of all processes: the first removes those of a run that was killed. Raises
    DestinationExists, and OutputError if something else is where parts go."""
    output.check_free()
    rank, _ = _here()
    if rank:
        return
    output.check_links()
    for folder in (output.partial, _merged(output)):
        if not folder.exists():
            continue
        if others := [path.name for path in folder.iterdir() if not _LEFT.fullmatch(path.name)]:
            raise OutputError(f"{others[0]} is there, and no recorder left it", where=folder)
        shutil.rmtree(folder)


def write_part(output: Output, states: Fp8States) -> None:
    """Write what this process recorded; and the file, if the parts of all are there. Raises DestinationExists."""
    rank, count = _here()
    output.check_free()
    with disk_problems(output):
        if count == 1:
            output.path.parent.mkdir(parents=True, exist_ok=True)
            write_then_rename(output.path, lambda path: sidecar.write(path, merged([states])))
            return
        parts = [output.partial / f"{number} of {count}.safetensors" for number in range(count)]
        new = parts[rank].with_suffix(".new")
        sidecar.write(new, states)
        os.rename(new, parts[rank])  # from now on another process may merge all parts, and remove the folder
        if not all(part.exists() for part in parts):
            return
        try:
            (output.partial / _CHOSEN).touch(exist_ok=False)
        except (FileExistsError, FileNotFoundError):  # another process found all parts, too
            return
        read = map(sidecar.read, parts)
        write_then_rename(output.path, lambda path: sidecar.write(path, merged(read)), beside=output.partial)
        output.partial.rename(_merged(output))  # at once, so that nobody finds all parts there without the choice
        shutil.rmtree(_merged(output))


def _merged(output: Output) -> Path:
    """Where the folder of parts goes that are in the file."""
    return output.partial.with_name(f"{output.path.name}.merged")


def key_of(module: str, expert: int | None) -> str:
    """The name in a part of the state of a module, or of one expert in it."""
    return module if expert is None else f"{module}[{expert}]"


def merged(parts: Iterable[Fp8States]) -> Fp8States:
    """The states of all processes merged to one. If several recorded a tensor, each row of the history is the largest
    of theirs. Experts have keys `module[expert]` in a part, and are stacked to their module's state; an expert that
    nobody recorded has fresh state."""
    parts = list(parts)
    by_key: dict[str, list[Fp8State]] = {}
    for part in parts:
        for key, state in part.modules.items():
            by_key.setdefault(key, []).append(state)
    modules: dict[str, Fp8State] = {}
    experts: dict[str, dict[int, Fp8State]] = {}
    for key, states in by_key.items():
        state = Fp8State.merge(states)
        if found := _EXPERT.fullmatch(key):
            experts.setdefault(found[1], {})[int(found[2])] = state
        else:
            modules[key] = state
    for module, numbered in experts.items():
        roles = next(iter(numbered.values())).roles
        never = Fp8State({role: RoleState.fresh(parts[0].recipe.amax_history_len) for role in roles})
        modules[module] = Fp8State.of_experts([numbered.get(number, never) for number in range(max(numbered) + 1)])
    digest = next((part.of_weights for part in parts if part.of_weights), None)
    return replace(parts[0], modules=modules, of_weights=digest)


def _here() -> tuple[int, int]:
    """The number of this process and of all that train."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
