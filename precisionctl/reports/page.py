"""One HTML page, whole in itself: no script, no font, no image from elsewhere; light and dark."""

from collections.abc import Sequence
from html import escape

from precisionctl.errors import printable
from precisionctl.reports.table import Table

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2430; --soft: #667085; --line: #e3e7ee; --code: #f5f7fa }
@media (prefers-color-scheme: dark) {
  :root { --paper: #12161d; --ink: #e6eaf0; --soft: #97a3b6; --line: #2a323e; --code: #1b212b }
}
body { background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; margin: 0 }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .4rem }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem }
p { max-width: 44rem; margin: .4rem 0 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .4rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top }
th { color: var(--soft); font-weight: 600 }
.number { text-align: right; white-space: nowrap }
@media (max-width: 40rem) {
  th, td { padding: .35rem .45rem }
  td:not(.number) { min-width: 8rem; overflow-wrap: anywhere }
}
pre, code { font: .85rem/1.5 ui-monospace, monospace; background: var(--code); border-radius: 4px }
pre { padding: .7rem .9rem; overflow-x: auto }
svg { width: 100%; height: auto }
svg text { fill: var(--ink) !important; font-family: inherit !important }
svg g[id^="matplotlib.axis"] path, svg g[id^="matplotlib.axis"] use { stroke: var(--soft) !important }
svg g[id^="patch"] path { stroke: var(--soft) !important }
"""


def page(title: str, parts: Sequence[str], style: str = "") -> str:
    """A whole page. `parts` are HTML, made by the functions below; `style` is CSS for what else they have."""
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{escaped(title)}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


def escaped(text: str) -> str:
    """Text as HTML, without letters that turn the direction of reading round or cannot be encoded."""
    return escape(printable(text))


def heading(text: str) -> str:
    """A heading within a page."""
    return f"<h2>{escaped(text)}</h2>"


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{escaped(text)}</p>"


def commands(lines: Sequence[str]) -> str:
    """Command lines as they were run."""
    return f"<pre>{escaped(chr(10).join(lines))}</pre>"


def html_table(table: Table) -> str:
    """A table under its title."""
    head = "".join(_cell("th", table, i, text) for i, text in enumerate(table.columns))
    rows = "".join(
        f"<tr>{''.join(_cell('td', table, i, text) for i, text in enumerate(row))}</tr>\n" for row in table.rows
    )
    return f'{heading(table.title)}\n<div class="scroll"><table>\n<tr>{head}</tr>\n{rows}</table></div>'


def _cell(tag: str, table: Table, column: int, text: str) -> str:
    number = ' class="number"' if table.is_numeric(column) else ""
    return f"<{tag}{number}>{escaped(text)}</{tag}>"
