"""All output to the terminal: results on stdout, progress and errors on stderr."""

import operator
import sys
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, Self

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable
from rich.text import Text

from precisionctl.errors import PrecisionctlError, brief, on_stdout, one_line
from precisionctl.reports.table import Table
from precisionctl.sizes import size

if TYPE_CHECKING:  # importing torch would make every error message slow
    from precisionctl.trainer.measure.meter import StepCost
    from precisionctl.trainer.measure.metrics import StepMetrics


class _Terminal(Console):
    """A console whose closed pipe is a BrokenPipeError, like any other's: rich ends the program with 1."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704  # it is called where the error is caught


_LOG_WIDTH = 120
"""The width of tables in files and pipes, if no word is longer."""

_out = _Terminal(highlight=False, width=None if sys.stdout.isatty() else _LOG_WIDTH)
_err = _Terminal(stderr=True, highlight=False)


@contextmanager
def quietly() -> Iterator[None]:
    """A context in which nothing is printed."""
    _out.quiet = _err.quiet = True
    try:
        yield
    finally:
        _out.quiet = _err.quiet = False


def show_tables(tables: Sequence[Table]) -> None:
    """Print a report's tables on stdout; in a file or a pipe without blanks at the ends of lines."""
    with on_stdout():
        for table in tables:
            # texts of one line each, none of them without end
            title, *columns = (one_line(brief(text)) for text in (table.title, *table.columns))
            drawn = _draw(Table(title, columns, [[one_line(brief(cell)) for cell in row] for row in table.rows]))
            if _out.is_terminal:
                _out.print(drawn)
                continue
            for line in _out.render_lines(drawn, _out.options.update(width=sys.maxsize), pad=False):
                _out.out("".join(segment.text for segment in line).rstrip())


def show_lines(lines: Sequence[str]) -> None:
    """Print plain results on stdout, without wrapping, so that scripts can read them."""
    with on_stdout():
        for line in lines:
            _out.print(one_line(line), soft_wrap=True, markup=False)


def note(line: str) -> None:
    """Print a line on stderr: progress, as opposed to a result."""
    _err.print(one_line(brief(line)), soft_wrap=True, markup=False)


_FOLDED = 12
"""Columns in which a name can still be read, folded."""


def _draw(table: Table) -> RichTable:
    """A table at most as wide as the terminal, in which no number is broken. Where that is too narrow, each row is a
    list of its cells instead. In a file or a pipe names stay whole too, for searches, and the table is as wide as they
    need."""
    room = _out.width - 3 * len(table.columns) - 1
    if any(table.columns) and sum(_least(table)) > room:
        if _out.is_terminal:  # two columns without heads, with a pair of head and cell for each cell of each row
            pairs = [[*zip(table.columns, row, strict=True), ("", "")] for row in table.rows]
            return _draw(Table(table.title, ("", ""), [pair for each in pairs for pair in each][:-1]))
        room = sum(_least(table))
    title = Text(table.title)  # as Text, because a path may look like Rich's markup
    drawn = RichTable(
        title=title, title_justify="left", title_style="bold", show_header=any(table.columns), box=SIMPLE_HEAD
    )
    for number, (column, width) in enumerate(zip(table.columns, _widths(table, room), strict=True)):
        side: Literal["left", "right"] = "right" if table.is_numeric(number) else "left"
        drawn.add_column(Text(column), justify=side, overflow="fold", width=width)
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn


def _least(table: Table) -> list[int]:
    """The smallest width of each column, in letters, with which no whole number and no word of a head is broken; other
    words may be folded if they stay easy to read, but not where `_draw` leaves them whole."""
    folded = _FOLDED if _out.is_terminal else _LOG_WIDTH
    least = []
    for number, head in enumerate(table.columns):
        cells = [row[number] for row in table.rows]
        words = cells if table.is_numeric(number) else " ".join(cells).split()
        least.append(max((min(len(word), folded) for word in [*words, *head.split()]), default=0))
    return least


def _widths(table: Table, room: int) -> list[int]:
    """The width of each column, in letters. If not all columns have room for their widest cell, first heads are folded,
    then the widest cells, but none below its `_least` width."""
    least = _least(table)
    cells = [[cell_len(row[number]) for row in table.rows] for number in range(len(table.columns))]
    folded = [max([*each, words]) for each, words in zip(cells, least, strict=True)]
    widths = [max(cell_len(head), width) for head, width in zip(table.columns, folded, strict=True)]
    for floors in (folded, least):
        while (beyond := sum(widths) - room) > 0 and any(map(operator.gt, widths, floors)):
            wide = [at for at, width in enumerate(widths) if width > floors[at]]
            widest = max(wide, key=widths.__getitem__)
            others = max((widths[at] for at in wide if at != widest), default=0)
            widths[widest] = max(widths[widest] - beyond, min(others, widths[widest] - 1), floors[widest])
    return widths


def show_error(error: PrecisionctlError) -> None:
    """Print an error on stderr: what, where, what to do. On a terminal that is one panel; elsewhere, where somebody may
    search for it, an unbroken `error[kind]: what (where). do`, whose items, if it lists some, are a line each."""
    kind = type(error).__name__
    if not _err.is_terminal:
        unbroken = "\n- ".join(" ".join(part.splitlines()) for part in str(error).split("\n- "))
        _err.print(f"error[{kind}]: {unbroken}", soft_wrap=True, markup=False)
        return
    lines = [Text(error.what), Text(error.where, style="dim"), Text(error.do, style="bold")]
    body = Text("\n").join(line for line in lines if line)
    _err.print(Panel(body, title=kind, title_align="left", border_style="red"))


class BytesBar:
    """Advances a bar by the number of further bytes that it is called with. At the end the bar is full, as totals are
    of stored bytes and may be off; unless what it shows was `stopped`."""

    def __init__(self, update: Callable[..., None]) -> None:
        self._update, self.stopped = update, False

    def __call__(self, count: int) -> None:
        self._update(advance=count)


@contextmanager
def bytes_progress(what: str, total: int, *, quiet: bool = False) -> Iterator[BytesBar]:
    """A progress bar of bytes on stderr. A `total` of 0 is not known."""
    columns = DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    progress = Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=_err, disable=quiet)
    with _bar(progress, what, total or None) as update:
        yield (bar := BytesBar(update))
        if not bar.stopped:
            progress.update(progress.task_ids[0], completed=progress.tasks[0].total)


@contextmanager
def rows_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar of rows on stderr; call what it yields with the number done and the number of all."""
    columns = MofNCompleteColumn(), TimeRemainingColumn()
    progress = Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=_err)
    with _bar(progress, what) as update:
        yield lambda done, total: update(completed=done, total=total)


@contextmanager
def _bar(progress: Progress, what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr. It appears with the first call of the yielded function (`Progress.update`). So an error
    before that is shown without a bar, and only a rank that calls it shows one."""
    task = progress.add_task(what, total=total)

    def update(**changes: Any) -> None:
        progress.start()
        progress.update(task, **changes)

    try:
        yield update
    finally:
        if progress.live.is_started:
            progress.stop()


class RunView:
    """A run's progress on stderr: a panel that is redrawn each step or, without a terminal, a line every LOG_EVERY
    steps."""

    def __init__(self) -> None:
        self._live = Live(console=_err, auto_refresh=False)
        self._so_far = _RunSoFar()
        self._title, self._steps = "", 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def tokenized(self, count: int) -> None:
        """Show the number of tokens made so far, as tokenizing may take hours before a run starts."""
        note(f"tokenized {count:,}")

    def start(self, title: str, step: int, steps: int) -> None:
        """Show that a run starts after step `step`, which ends at step `steps`. A rollback starts it again, earlier."""
        self._title, self._steps = title, steps
        self._so_far.go_back(step)
        if _err.is_terminal:
            self._live.start()

    def step(self, step: "StepMetrics") -> None:
        """Show a finished step."""
        if self._live.is_started:
            self._so_far.add(step)
            title = Text(one_line(self._title))
            panel = Panel(_draw_run(self._so_far, self._steps), title=title, title_align="left")
            self._live.update(panel, refresh=True)
        elif step.step % LOG_EVERY == 0 or step.step in (1, self._steps):
            held_out = "" if step.held_out_loss is None else f"  held out {step.held_out_loss:.4f}"
            rate = f"{step.tokens_per_second:,.0f} tokens/s"
            compute = f"  {_compute(step.cost)}" if step.cost else ""
            line = f"step {step.step}/{self._steps}  loss {step.loss:.4f}{held_out}  lr {step.lr:.2e}  {rate}{compute}"
            _err.print(line, soft_wrap=True)

    def say(self, line: str) -> None:
        """Print a line that stays on the screen."""
        note(line)


LOG_EVERY = 10
"""Steps between two lines if stderr is not a terminal."""


_LETTERS = 40
"""Width of a loss curve."""


class _RunSoFar:
    """What the panel shows of a run's steps. It takes as long to draw after many steps as after few: the curve is made
    of running totals of the losses, whose differences say the means of any steps."""

    def __init__(self) -> None:
        self.recent: deque[StepMetrics] = deque(maxlen=20)
        self.held_out: list[tuple[int, float]] = []
        self._steps, self._totals = array("q"), array("d", [0.0])

    def add(self, step: "StepMetrics") -> None:
        self.recent.append(step)
        if step.held_out_loss is not None:
            self.held_out.append((step.step, step.held_out_loss))
        if not step.skipped:
            self._steps.append(step.step)
            self._totals.append(self._totals[-1] + step.loss)

    def go_back(self, step: int) -> None:
        """Forget the steps after this one."""
        self.recent = deque((seen for seen in self.recent if seen.step <= step), self.recent.maxlen)
        self.held_out = [seen for seen in self.held_out if seen[0] <= step]
        kept = bisect_right(self._steps, step)
        del self._steps[kept:], self._totals[kept + 1 :]

    @property
    def losses(self) -> list[float]:
        """The mean losses of equal shares of the steps, one for each letter of the curve."""
        count, steps = min(_LETTERS, len(self._steps)), len(self._steps)
        cuts = [number * steps // count for number in range(count + 1)] if count else []
        return [(self._totals[end] - self._totals[start]) / (end - start) for start, end in pairwise(cuts)]


def _draw_run(so_far: _RunSoFar, steps: int) -> Group:
    last = so_far.recent[-1]
    left = fmean(step.seconds for step in so_far.recent) * (steps - last.step)
    bar = ProgressBar(total=steps, completed=last.step)
    numbers = RichTable.grid(padding=(0, 3))
    numbers.add_row("step", f"{last.step} of {steps}, {timedelta(seconds=round(left))} left")
    numbers.add_row("loss", f"{last.loss:.4f}  {_sparkline(so_far.losses)}")
    if so_far.held_out:
        numbers.add_row("held out", f"{so_far.held_out[-1][1]:.4f}")
    numbers.add_row("lr, gradient norm", f"{last.lr:.2e}, {last.grad_norm:.3f}")
    numbers.add_row("tokens", f"{last.tokens:,}, {last.tokens_per_second:,.0f} a second")
    if last.cost:
        numbers.add_row("compute", _compute(last.cost))
        host, gpu = f"{size(last.cost.host_bytes)} of the host", last.cost.gpu_bytes
        numbers.add_row("memory", host if gpu is None else f"{size(gpu)} of the GPU, {host}")
        if last.cost.fp8_clipped is not None and last.cost.fp8_underflow is not None:
            clipped, underflow = f"{last.cost.fp8_clipped:.1%}", f"{last.cost.fp8_underflow:.1%}"
            numbers.add_row("FP8", f"{clipped} of modules clipped, {underflow} underflowed")
    return Group(Padding(bar, 0), numbers)  # a bar by itself ends no line, and what follows it is cut off


def _compute(cost: "StepCost") -> str:
    rate = f"{cost.tflops:.4g} TFLOP/s"
    return rate if cost.mfu_bf16 is None else f"{rate}, {cost.mfu_bf16:.1%} of the BF16 peak"


def _sparkline(losses: Sequence[float]) -> str:
    """A loss curve as block characters."""
    if not losses:
        return ""
    low, span = min(losses), max(losses) - min(losses)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (loss - low) / span) if span > 0 else 0] for loss in losses)
