"""Everything that is drawn on a terminal: results on stdout, progress and errors on stderr."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from precisionctl.errors import PrecisionctlError
from precisionctl.reports.table import Table

_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False)


def show_tables(tables: Sequence[Table]) -> None:
    """A report on stdout."""
    for table in tables:
        _out.print(_draw(table))


def _draw(table: Table) -> RichTable:
    drawn = RichTable(
        title=table.title, title_justify="left", title_style="bold", show_header=any(table.columns), box=SIMPLE_HEAD
    )
    for number, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if table.is_numeric(number) else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn


def show_error(error: Exception) -> None:
    """One panel on stderr: what, where, what to do."""
    what, where, do = _parts(error)
    lines = [Text(what), Text(where, style="dim"), Text(do, style="bold")]
    body = Text("\n").join(line for line in lines if line)
    title = "cannot read or write" if isinstance(error, OSError) else type(error).__name__
    _err.print(Panel(body, title=title, title_align="left", border_style="red"))


def _parts(error: Exception) -> tuple[str, str, str]:
    if isinstance(error, PrecisionctlError):
        return error.what, error.where, error.do
    if isinstance(error, OSError):
        return error.strerror or str(error), str(error.filename or ""), ""
    return str(error), "", ""
