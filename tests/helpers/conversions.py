"""Conversions as tests make them, and what is looked at of a result."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.megatron.keys import directory_name, write_tracker
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_files import torch_zip, torch_zip_writer
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import PlannedCommand, execute


def run(
    source: Path,
    destination: Path,
    to: Any,
    precision: Any = "keep",
    *,
    workers: int = 1,
    verify: bool = False,
    **options: Any,
) -> PlannedCommand:
    """`precisionctl convert` in this process. Further options are those of a Request."""
    return carry_out(Request(source, destination, to, precision, **options), workers=workers, verify=verify)


def carry_out(request: Request, **how: Any) -> PlannedCommand:
    """Plan and execute. The command, with the notes of both."""
    command = plan_command(request)
    found = execute(command, **how)
    return replace(command, notes=(*command.notes, *(found.notes if found else ())))


def tree(directory: Path) -> dict[str, bytes]:
    """The bytes of all files in a directory, by their paths in it."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, as stored."""
    reader: Reader = open_checkpoint(path)
    return {name: read_tensor(reader, name) for name in reader.specs}


def assert_same_tensors(a: Path, b: Path) -> None:
    left, right = tensors(a), tensors(b)
    assert set(left) == set(right)
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert torch.equal(left[name].flatten().view(torch.uint8), right[name].flatten().view(torch.uint8)), name


def assert_there_and_back(source: Path, **options: Any) -> None:
    """A Hugging Face directory of one file has every bit back from a Megatron checkpoint with these options."""
    megatron, again = source.with_name("megatron"), source.with_name("again")
    run(source, megatron, "megatron", **options)
    run(megatron, again, "hf")
    stored, back = (load_file(directory / "model.safetensors") for directory in (source, again))
    assert stored.keys() == back.keys()
    assert [name for name in stored if not torch.equal(stored[name], back[name])] == []


def change_args(iteration: Path, **args: Any) -> None:
    """Change or add Megatron's arguments in an iteration of a `torch_dist` checkpoint; remove what becomes None."""
    file = iteration / "common.pt"
    common = torch_zip.load(file.read_bytes(), file)
    changed = vars(common["args"]) | args
    vars(common["args"]).clear()
    vars(common["args"]).update({name: value for name, value in changed.items() if value is not None})
    file.write_bytes(torch_zip_writer.dump(common))


def as_iteration(checkpoint: Path, number: int) -> Path:
    """Make iteration `number` of a run out of the `release` in a `torch_dist` checkpoint, which belongs to none. Its
    directory."""
    iteration = (checkpoint / "release").rename(checkpoint / directory_name(number))
    file = iteration / "common.pt"
    common = torch_zip.load(file.read_bytes(), file)
    file.write_bytes(torch_zip_writer.dump({**common, "iteration": number}))
    write_tracker(checkpoint, number)
    return iteration
