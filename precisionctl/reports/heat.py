"""Heat maps for a page: layers down, the roles of each kind of module across; tables with titles, and no script.

Colours are steps, told apart by the colour-blind, in light and dark: blue ones up to a limit, warm ones beyond it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from precisionctl.reports.page import escaped

COOL, WARM = 5, 3
"""Steps up to a limit, and beyond it."""

STYLE = """
:root { --c0: #f1f5f9; --c1: #dce8f4; --c2: #bdd5ec; --c3: #95bbdf; --c4: #6d9fce;
  --w0: #fcd9a8; --w1: #f3a04f; --w2: #cf4257; --on-warm: #fff; --hatch: #d5dbe4 }
@media (prefers-color-scheme: dark) {
  :root { --c0: #1a222c; --c1: #1d2f42; --c2: #21425f; --c3: #26587f; --c4: #2d719f;
    --w0: #6e4c1d; --w1: #a86219; --w2: #c23c52; --on-warm: #fff; --hatch: #323b48 }
}
.tabs { margin: 1rem 0 }
.tabs > input { position: absolute; opacity: 0; pointer-events: none }
.tabs > label { display: inline-block; padding: .3rem .75rem; margin: 0 .25rem .4rem 0; border: 1px solid var(--line);
  border-radius: 999px; font-size: .88rem; color: var(--soft); cursor: pointer }
.tabs > label:hover { color: var(--ink) }
.tabs > input:checked + label { background: var(--ink); color: var(--paper); border-color: var(--ink) }
.tabs > input:focus-visible + label { outline: 2px solid var(--c4); outline-offset: 2px }
.panel { display: none }
.heat { overflow: auto; max-height: 85vh; border: 1px solid var(--line); border-radius: 6px; margin: .6rem 0 }
.heat table { width: auto; min-width: 100%; border-collapse: separate; border-spacing: 1px;
  font-size: .74rem; line-height: 1.25 }
.heat th, .heat td { border: 0; padding: .15rem .4rem; text-align: center; white-space: nowrap }
.heat thead th { position: sticky; background: var(--paper); z-index: 2; font-weight: 600 }
.heat thead tr:first-child th { top: 0; height: 1.2rem; color: var(--ink); border-left: 3px solid var(--paper) }
.heat thead tr + tr th { top: 1.5rem; font-weight: 400 }
.heat tbody th { position: sticky; left: 0; background: var(--paper); z-index: 1; text-align: right; min-width: 2.4rem }
.heat thead th:first-child { left: 0; z-index: 3 }
.heat td { min-width: 3.1rem; border-radius: 2px }
.heat td.first { border-left: 3px solid var(--paper) }
.c0 { background: var(--c0) } .c1 { background: var(--c1) } .c2 { background: var(--c2) }
.c3 { background: var(--c3) } .c4 { background: var(--c4) }
.w0, .w1, .w2 { font-weight: 600 }
.w0 { background: var(--w0) } .w1 { background: var(--w1) } .w2 { background: var(--w2); color: var(--on-warm) }
.unknown { background: repeating-linear-gradient(135deg, var(--hatch) 0 2px, transparent 2px 7px); color: var(--soft) }
.legend { display: flex; flex-wrap: wrap; gap: .35rem .9rem; font-size: .8rem; color: var(--soft); margin: .5rem 0 }
.legend i { display: inline-block; width: 1.1rem; height: .9rem; border-radius: 2px; vertical-align: -.1rem;
  margin-right: .35rem; border: 1px solid var(--line) }
.heat td:focus { outline: 2px solid var(--ink) }
.heat td:focus::after { content: attr(title); position: fixed; left: 0; right: 0; bottom: 0; z-index: 9;
  padding: .7rem 1rem; background: var(--ink); color: var(--paper); font-size: .9rem; text-align: left;
  white-space: normal }
@media (max-width: 40rem) { main { padding: 1.2rem .8rem } .tabs > label { padding: .45rem .8rem } }
@media print { .panel { display: block } .tabs > label { display: none } .heat { max-height: none } }
"""


@dataclass(frozen=True)
class ColourScale:
    """The colour of a value. `cool` and `warm` are ascending upper bounds of the steps of colour, the last of `warm`
    open; `words` formats a bound for the legend."""

    cool: Sequence[float]
    warm: Sequence[float]
    words: Callable[[float], str]

    def step(self, value: float) -> str:
        """The CSS class of a value."""
        for number, bound in enumerate(self.cool):
            if value <= bound:
                return f"c{number}"
        return f"w{sum(value > bound for bound in self.warm[: WARM - 1])}" if self.warm else f"c{COOL - 1}"

    def legend(self) -> str:
        items, low = [], ""
        for prefix, bounds in (("c", self.cool), ("w", self.warm)):
            for number, bound in enumerate(bounds):
                last = prefix == "w" and number == len(bounds) - 1
                up_to = f"to {self.words(bound)}" if bound else self.words(bound)
                items.append((f"{prefix}{number}", f"above {low}" if last else up_to))
                low = self.words(bound)
        items.append(("unknown", "not known"))
        return legend(items)


def legend(items: Sequence[tuple[str, str]]) -> str:
    """Classes and what they mean."""
    swatches = "".join(f'<span><i class="{name}"></i>{escaped(text)}</span>' for name, text in items)
    return f'<p class="legend">{swatches}</p>'


@dataclass(frozen=True)
class Cell:
    """A cell for one role of one module: its CSS class, a few characters of text, and the full information as a
    title."""

    step: str
    text: str
    title: str


Column = tuple[str, str]
"""A kind of module, and a role."""


def heat_map(rows: Mapping[str, Mapping[Column, Cell]], columns: Sequence[Column]) -> str:
    """A table under two heads: kinds, and their roles. Where a row has no such role, it stays empty."""
    kinds: dict[str, int] = {}
    for kind, _ in columns:
        kinds[kind] = kinds.get(kind, 0) + 1
    first = {column for number, column in enumerate(columns) if number == 0 or columns[number - 1][0] != column[0]}
    # Without the block that it is in: `mlp.experts.linear_fc1` is `experts.linear_fc1`; the title has all
    head = "".join(
        f'<th colspan="{count}" title="{escaped(kind)}">{escaped(kind.partition(".")[2] or kind)}</th>'
        for kind, count in kinds.items()
    )
    heads = "".join(f"<th>{escaped(role)}</th>" for _, role in columns)
    body = ""
    for label, cells in rows.items():
        drawn = "".join(_cell(cells.get(column), column in first) for column in columns)
        body += f"<tr><th>{escaped(label)}</th>{drawn}</tr>\n"
    return (
        f'<div class="heat"><table>\n<thead><tr><th></th>{head}</tr>\n<tr><th>layer</th>{heads}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table></div>"
    )


def _cell(cell: Cell | None, first: bool) -> str:
    name = " first" if first else ""
    if cell is None:
        return f'<td class="{name.strip()}"></td>' if first else "<td></td>"
    title = escaped(cell.title)  # a finger cannot point: it focuses, and CSS shows the title
    return f'<td class="{cell.step}{name}" tabindex="-1" title="{title}">{escaped(cell.text)}</td>'


def tabs(panels: Mapping[str, str]) -> str:
    """Panels of which one shows, chosen by its label: radio buttons and CSS. A page has one set of them."""
    ids = [f"tab-{number}" for number in range(len(panels))]
    rules = ", ".join(f"#{each}:checked ~ .{each}" for each in ids)
    inputs = "".join(
        f'<input type="radio" name="tab" id="{each}"{" checked" if number == 0 else ""}>'
        f'<label for="{each}">{escaped(label)}</label>'
        for number, (each, label) in enumerate(zip(ids, panels, strict=True))
    )
    bodies = "".join(
        f'<section class="panel {each}">{panel}</section>' for each, panel in zip(ids, panels.values(), strict=True)
    )
    return f'<style>{rules} {{ display: block }}</style>\n<div class="tabs">{inputs}\n{bodies}</div>'
