"""Table: what every report shows, on a terminal, in a page or in a file, without knowing which."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Cells are text, formatted already; `rows` are as long as `columns`."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def is_numeric(self, column: int) -> bool:
        """True where every cell is a number, perhaps with a sign and a unit: those columns align right."""
        cells = [row[column] for row in self.rows]
        return bool(cells) and all(cell.lstrip("+-−")[:1].isdigit() for cell in cells if cell != "-")


def size(count: float) -> str:
    """Bytes for people: `1.5 GB`, in powers of 1000 as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def percent(ratio: float) -> str:
    """A relative gap with its sign: `+0.12 %`."""
    return f"{100 * ratio:+.2f} %"
