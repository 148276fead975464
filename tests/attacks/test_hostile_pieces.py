"""Pieces in safetensors that do not make one tensor, or say that they are of one as large as memory: one short error
each, for all commands open a checkpoint."""

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import CheckpointError

Piece = tuple[list[int], torch.Tensor]
HALF = torch.ones(2, 3)


def files(*pieces: Piece, name: str = "a") -> Callable[[Path], object]:
    """A file for each piece of a tensor."""

    def make(directory: Path) -> None:
        for rank, (place, tensor) in enumerate(pieces, 1):
            said = {"DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": place}})}
            save_file({name: tensor}, directory / f"shard-{rank:05}-model-00001-of-00001.safetensors", said)

    return make


def and_then(make: Callable[[Path], object], more: Callable[[Path], object]) -> Callable[[Path], object]:
    def both(directory: Path) -> None:
        make(directory)
        more(directory)

    return both


SOUND = files(([0, 0], HALF), ([2, 0], HALF))

BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a hole": (files(([0, 0], HALF), ([3, 0], HALF)), r"reach to \[5, 3\], and have 12 of those 15 elements"),
    "no beginning": (files(([2, 0], HALF)), r"reach to \[4, 3\], and have 6 of those 12"),
    "more than it has room for": (files(([0, 0], HALF), ([1, 0], HALF)), r"\[3, 3\], and have 12 of those 9"),
    "a hole as large as an overlap": (
        files(([0, 0], HALF), ([1, 0], HALF), ([4, 0], HALF[:1])),
        r"pieces of a do not make one tensor \[5, 3\]",
    ),
    "an overlap of columns": (
        files(([0, 0], torch.ones(2, 2)), ([0, 1], torch.ones(1, 2))),
        r"pieces of a do not make one tensor \[2, 3\]",
    ),
    "the same piece twice": (
        files(([0, 0], HALF), ([2, 0], HALF), ([2, 0], HALF)),
        r"the piece of `a` at \[2, 0\] is in shard-00002-model-00001-of-00001.safetensors too",
    ),
    "two dtypes": (files(([0, 0], HALF), ([2, 0], HALF.bfloat16())), r"pieces float32 \[2, 3\] and bfloat16 \[2, 3\]"),
    "two and three dimensions": (
        files(([0, 0], HALF), ([2, 0, 0], torch.ones(2, 3, 1))),
        r"\[2, 3\] and .*\[2, 3, 1\]",
    ),
    "a place far away": (files(([0, 0], HALF), ([1 << 62, 0], HALF)), "have 12 of those"),
    "nothing far away": (files(([0, 0], HALF), ([1 << 62, 0], torch.ones(0, 3))), "have 6 of those"),
    "experts without end": (
        files(([0, 0, 0], torch.ones(2, 3, 1)), ([1 << 40, 0, 0], torch.ones(1, 3, 1)), name="experts.gate_up_proj"),
        "have 9 of those",
    ),
    "pieces of the third dimension": (
        files(([0, 0, 0], torch.ones(2, 3, 1)), ([0, 0, 1], torch.ones(2, 3, 1))),
        r"`a` \[2, 3, 2\] is cut in another dimension",
    ),
    "a file of whole tensors": (
        and_then(SOUND, lambda d: save_file({"b": HALF}, d / "model-00001-of-00001.safetensors")),
        "says not of what its tensors are pieces",
    ),
    "a link to elsewhere": (
        and_then(SOUND, lambda d: (d / "shard-00003.safetensors").symlink_to("/etc/passwd")),
        "leads out of the directory",
    ),
    "a link to nothing": (
        and_then(SOUND, lambda d: (d / "shard-00003.safetensors").symlink_to("nothing")),
        "a file is missing",
    ),
    "a pipe": (and_then(SOUND, lambda d: os.mkfifo(d / "shard-00000.safetensors")), "not a file"),
    "a directory": (and_then(SOUND, lambda d: (d / "shard-00000.safetensors").mkdir()), "not a file"),
    "a file that is cut short": (
        and_then(SOUND, lambda d: os.truncate(d / "shard-00002-model-00001-of-00001.safetensors", 150)),
        "where its header describes",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_pieces_that_make_no_tensor_are_one_short_error(tmp_path: Path, name: str) -> None:
    make, message = BAD[name]
    make(tmp_path)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()
    assert len(str(error.value)) < 1000


def test_what_they_are_spoilt_of_is_read(tmp_path: Path) -> None:
    SOUND(tmp_path)
    assert open_checkpoint(tmp_path).specs["a"].shape == (4, 3)
