"""Boxes of tensors are read from the chunks that cover them, and from nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from precisionctl.checkpoints.chunks import Box, Chunk, read_box, read_bytes, read_rows
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint
from precisionctl.param import TensorSpec

WHOLE = Box(0, 8, 0, 6)
NUMBERS = torch.arange(48, dtype=torch.float32).reshape(8, 6)


@dataclass(frozen=True)
class Cut:
    """The tensor `x`, `NUMBERS`, in these chunks."""

    held: Sequence[Chunk]

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {"x": TensorSpec((8, 6), DType.float32)}

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self.held


def in_files(directory: Path, boxes: Sequence[Box]) -> Cut:
    """Each box in a file of its own."""
    chunks = []
    for number, box in enumerate(boxes):
        path = directory / f"{number}.bin"
        part = NUMBERS[box.row : box.row + box.rows, box.column : box.column + box.columns]
        path.write_bytes(part.contiguous().numpy().tobytes())
        chunks.append(Chunk(box, path))
    return Cut(chunks)


QUARTERS = [Box(row, 4, column, 3) for row in (4, 0) for column in (3, 0)]


@pytest.mark.parametrize(
    "boxes",
    [
        [WHOLE],
        QUARTERS,
        [*QUARTERS, *QUARTERS[:2], WHOLE],  # replicas
        [Box(0, 5, 0, 6), Box(3, 5, 0, 6)],
        [*WHOLE.run(0, 8), *WHOLE.run(8, 21), *WHOLE.run(29, 19)],  # flat runs, which cut rows
    ],
)
def test_a_tensor_is_read_from_chunks_that_cover_it_also_where_they_overlap(tmp_path: Path, boxes: list[Box]) -> None:
    source = in_files(tmp_path, boxes)
    assert torch.equal(read_rows(source, "x", 0, 8), NUMBERS)
    assert torch.equal(read_box(source, "x", Box(2, 5, 1, 4)), NUMBERS[2:7, 1:5])
    assert read_bytes(source, "x", 3, 4).tobytes() == NUMBERS[3:7].numpy().tobytes()
    assert read_rows(source, "x", 3, 0).shape == (0, 6) and read_bytes(source, "x", 3, 0).shape == (0, 24)


@pytest.mark.parametrize(
    ("boxes", "where"),
    [
        ([], "row 0 from column 0"),
        (QUARTERS[:3], "row 0 from column 0"),
        ([QUARTERS[2], QUARTERS[2], QUARTERS[3], QUARTERS[0]], "row 4 from column 0"),  # as many elements as there are
        ([Box(0, 3, 0, 6), Box(4, 4, 0, 6), Box(4, 1, 0, 6)], "row 3 from column 0"),
        ([*WHOLE.run(0, 20), *WHOLE.run(21, 27)], "row 3 from column 2"),
    ],
)
def test_what_no_chunk_has_is_damage_and_not_what_memory_held(tmp_path: Path, boxes: list[Box], where: str) -> None:
    source = in_files(tmp_path, boxes)
    with pytest.raises(DamagedCheckpoint, match=f"`x` is not whole: no file has {where}"):
        read_rows(source, "x", 0, 8)
    with pytest.raises(DamagedCheckpoint, match="`x` is not whole"):
        read_bytes(source, "x", 0, 8)


def test_what_is_there_is_read_of_a_tensor_that_is_not_whole(tmp_path: Path) -> None:
    assert torch.equal(read_rows(in_files(tmp_path, [Box(0, 3, 0, 6)]), "x", 1, 2), NUMBERS[1:3])


def test_what_other_ranks_have_of_a_live_tensor_is_zeros() -> None:
    """Whoever reads has the columns 0 to 2, and writes these alone."""
    source, into = Cut([Chunk(Box(0, 8, 0, 3), NUMBERS[:, :3].contiguous())]), torch.full((8, 6), torch.nan)
    assert torch.equal(read_rows(source, "x", 0, 8, into), NUMBERS * torch.tensor([1.0, 1, 1, 0, 0, 0]))
