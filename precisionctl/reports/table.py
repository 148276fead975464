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
        cells = [row[column].lstrip("+-−") for row in self.rows if row[column] != "-"]
        return bool(self.rows) and all(cell[:1].isdigit() or cell in ("inf", "nan") for cell in cells)


def percent(ratio: float, places: int = 2) -> str:
    """A relative gap with its sign: `+0.12 %`."""
    return f"{100 * ratio:+.{places}f} %"
