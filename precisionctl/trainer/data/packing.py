"""Texts put together into rows, so that little of a row is padding."""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np


def pack(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: the longest first, each into the row that it leaves least room in.

    Gives the numbers of the texts in each row, and no row is filled beyond `capacity`, which no size may exceed. The
    sizes alone decide. It needs at most 11/9 of the fewest rows possible, and one more (Johnson, 1974).
    """
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # rows by the room that is left in them
    rooms: list[int] = []  # the keys of it, in order
    for text in np.argsort(-np.asarray(sizes, np.int64), kind="stable").tolist():
        size = int(sizes[text])
        nearest = bisect_left(rooms, size)
        if nearest == len(rooms):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room = rooms[nearest]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[nearest]
        rows[row].append(text)
        left = room - size
        if left not in with_room:
            with_room[left] = []
            insort(rooms, left)
        with_room[left].append(row)
    return rows
