import errno
import io
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from precisionctl import console
from precisionctl.cli.group import as_our_error
from precisionctl.errors import DataError
from precisionctl.reports.table import Table, percent
from precisionctl.sizes import size
from precisionctl.trainer.measure.meter import StepCost
from precisionctl.trainer.measure.metrics import StepMetrics


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What is drawn on stderr, as on a terminal of 80 columns without colours."""
    text = io.StringIO()
    monkeypatch.setattr(console, "_err", Console(file=text, force_terminal=True, width=80, no_color=True))
    return text


def step(number: int, loss: float, held_out: float | None = None) -> StepMetrics:
    return StepMetrics(number, loss, 1e-3, 1.0, number * 64, 640.0, 0.1, held_out)


TAKEN = StepCost(412.34, 0.417, 62_100_000_000, 12_000_000_000, 0.125, 0.0)


def test_an_error_shows_what_where_and_what_to_do(shown: io.StringIO) -> None:
    console.show_error(DataError("no [text] in it", where="here.jsonl", do="Give text."))
    for part in ("DataError", "no [text] in it", "here.jsonl", "Give text."):
        assert part in shown.getvalue()


def test_an_error_of_the_system_names_the_file(shown: io.StringIO) -> None:
    console.show_error(as_our_error(PermissionError(13, "Permission denied", "/some/file")))
    assert "Permission denied" in shown.getvalue() and "/some/file" in shown.getvalue()


@pytest.mark.parametrize(
    ("error", "is_of_path"),
    [
        (OSError(errno.EROFS, "Read-only file system", "/out"), True),
        (OSError(errno.ENOSPC, "No space left on device", "/out"), False),
        (OSError(errno.EMFILE, "Too many open files", "/in"), False),
        (OSError(errno.ENOENT, "No such file or directory"), False),
    ],
)
def test_the_path_is_asked_about_only_where_it_may_be_wrong(error: OSError, is_of_path: bool) -> None:
    told = as_our_error(error)
    assert told.do and ("Is the path right" in told.do) == is_of_path


def test_elsewhere_than_on_a_terminal_an_error_is_one_line_and_its_paths_are_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text, path = io.StringIO(), f"/{'long/' * 60}here.jsonl"
    monkeypatch.setattr(console, "_err", Console(file=text, width=80))
    console.show_error(DataError("no [text] in it", where=path, do="Give text."))
    assert text.getvalue() == f"error[DataError]: no [text] in it ({path}). Give text.\n"


def test_a_bar_is_drawn_when_something_is_done_and_not_before_an_error(shown: io.StringIO) -> None:
    for progress in (console.bytes_progress("writing", 10), console.rows_progress("evaluating")):
        with pytest.raises(DataError), progress:
            raise DataError("")
    assert shown.getvalue() == ""
    with console.bytes_progress("writing", 10) as on_bytes, console.rows_progress("evaluating") as on_rows:
        on_bytes(10)
        on_rows(1, 2)
    with console.bytes_progress("whole", 100) as on_bytes:
        on_bytes(97)
    with console.bytes_progress("stopped", 1000) as on_bytes:
        on_bytes(70)
        on_bytes.stopped = True
    assert "100/100 bytes" in shown.getvalue() and shown.getvalue().count("0.1/1.0 kB") == 1
    assert "writing" in shown.getvalue() and "10/10 bytes" in shown.getvalue() and "evaluating" in shown.getvalue()


def test_a_run_on_a_terminal_is_one_panel_with_time_left_and_the_curve(shown: io.StringIO) -> None:
    with console.RunView() as view:
        view.start("FP8", 0, 30)
        for number in range(1, 11):
            view.step(step(number, 5.0 - number / 10, held_out=4.5 if number == 10 else None))
    for part in ("FP8", "10 of 30, 0:00:02 left", "4.0000", "█", "▁", "held out", "640 a second"):
        assert part in shown.getvalue()


def test_after_a_rollback_the_curve_has_no_step_that_was_undone(shown: io.StringIO) -> None:
    with console.RunView() as view:
        view.start("FP8", 0, 30)
        for number in range(1, 4):
            view.step(step(number, 2.0 + number))
        view.start("FP8", 1, 30)
        for number in range(2, 4):
            view.step(step(number, 2.0))
    assert "2.0000  █▁▁" in shown.getvalue().rpartition("loss")[2]


def test_the_panel_of_a_long_run_takes_no_longer_to_draw_and_has_the_whole_curve(
    shown: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    sparkline = console._sparkline
    monkeypatch.setattr(console, "_sparkline", lambda losses: drawn.append((len(losses), sparkline(losses))) or "")
    steps = 40 * 2**7
    with console.RunView() as view:
        view.start("FP8", 0, steps)
        monkeypatch.setattr(view._live, "update", lambda panel, refresh: None)
        for number in range(1, steps + 1):
            view.step(step(number, float(steps - number), held_out=float(number) if number % 1000 == 0 else None))
        assert max(count for count, _ in drawn) == 40 and len(view._so_far.recent) == 20
        falls = "".join("█▇▆▅▄▃▂▁"[round(7 * place / 39)] for place in range(40))  # of a straight line
        assert drawn[-1][1] == falls
        view.start("FP8", steps // 2, steps)
        view.step(step(steps // 2 + 1, steps / 2 - 1))
        assert view._so_far.held_out[-1] == (2000, 2000.0) and len(view._so_far.recent) == 1
        assert drawn[-1][1] == falls
        view.step(step(steps // 2 + 2, -1e9))
        assert drawn[-1][1] == "█" * 39 + "▁"


def test_on_a_terminal_with_colours_no_line_of_the_panel_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    colours = Console(file=text, force_terminal=True, width=80, color_system="truecolor", legacy_windows=False)
    monkeypatch.setattr(console, "_err", colours)
    with console.RunView() as view:
        view.start("FP8", 0, 30)
        view.step(step(10, 4.0))
    assert "\x1b[38;2;" in text.getvalue() and "10 of 30, 0:00:02 left" in text.getvalue()


def test_the_panel_says_what_a_step_took_and_needs_no_more_than_80_columns(shown: io.StringIO) -> None:
    with console.RunView() as view:
        view.start("FP8, delayed scaling", 0, 250_000)
        for number in range(100_000, 100_050):
            wide = StepMetrics(number, 2.0, 1e-3, 1.0, 10**13, 1234567.0, 10.0, 2.5, cost=TAKEN)
            view.step(wide)
    text = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", shown.getvalue())
    drawn = text[text.rindex("╭") : text.rindex("╯") + 1].splitlines()
    for part in (
        "412.3 TFLOP/s, 41.7% of the BF16 peak",
        "62.1 GB of the GPU, 12.0 GB of the host",
        "12.5% of modules clipped, 0.0% underflowed",
    ):
        assert sum(part in line for line in drawn) == 1
    assert all(len(line) == 80 for line in drawn)
    assert sum(line.startswith("│  ") for line in drawn) == 0  # nothing was wrapped into a line of its own


def test_of_a_cpu_no_peak_and_no_gpu_are_shown(shown: io.StringIO) -> None:
    with console.RunView() as view:
        view.start("BF16", 0, 3)
        view.step(replace(step(1, 2.0), cost=StepCost(0.0123, None, None, 500_000_000)))
    for part in ("0.0123 TFLOP/s", "500.0 MB of the host"):
        assert part in shown.getvalue()
    assert "peak" not in shown.getvalue() and "GPU" not in shown.getvalue() and "clipped" not in shown.getvalue()


def test_a_run_elsewhere_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(console, "_err", Console(file=text))
    with console.RunView() as view:
        view.tokenized(10_000_000)
        view.start("FP8", 0, 12)
        for number in range(1, 13):
            view.step(step(number, 3.0))
    said = [line.split("  ")[0] for line in text.getvalue().splitlines()]
    assert said == ["tokenized 10,000,000", "step 1/12", "step 10/12", "step 12/12"]


def test_columns_of_numbers_align_right() -> None:
    table = Table("", ("name", "gap", "at"), [("a", "+1.0 %", "3"), ("1b", "-", "-")])
    assert [table.is_numeric(column) for column in range(3)] == [False, True, True]


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (4_700_000, "4.7 MB"), (3e15, "3000.0 TB")])
def test_sizes_are_for_people(count: float, text: str) -> None:
    assert size(count) == text


def test_a_gap_has_its_sign() -> None:
    assert (percent(0.0012), percent(-0.01)) == ("+0.12 %", "-1.00 %")


def test_what_a_file_says_cannot_drive_the_terminal(monkeypatch: pytest.MonkeyPatch, shown: io.StringIO) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(console, "_out", Console(file=out, force_terminal=True, width=200, no_color=True))
    name = "\x1b[2J\x1b]0;title\x07 \u202e \ud800"
    console.show_tables([Table("names", ("name",), [(name,)])])
    console.show_lines([name])
    console.show_error(DataError(name))
    console.show_error(as_our_error(FileNotFoundError(2, "No such file", name)))
    out.flush()
    assert isinstance(out.buffer, io.BytesIO)
    for text in (out.buffer.getvalue().decode(), shown.getvalue()):
        assert "\x1b[2J" not in text and "\x1b]" not in text and "\u202e" not in text
        assert text.count("\\ud800") == 2


def test_what_a_file_says_at_length_is_cut(monkeypatch: pytest.MonkeyPatch, shown: io.StringIO) -> None:
    """A `model_type` of ten megabytes was printed whole."""
    stdout, long = io.StringIO(), "x" * 10_000_000
    monkeypatch.setattr(console, "_out", Console(file=stdout, width=200, highlight=False))
    console.show_tables([Table(long, ("", ""), [("architecture", long)])])
    console.note(long)
    console.show_error(DataError(long))
    for text, count in ((stdout.getvalue(), 2), (shown.getvalue(), 2)):
        assert text.count("x") == 2000 * count and text.count("...") == count


def test_what_rich_takes_for_markup_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path may have brackets, in a title or over a column; `[/x]` would be an error."""
    stdout = io.StringIO()
    monkeypatch.setattr(console, "_out", Console(file=stdout, width=200, highlight=False))
    console.show_tables([Table("runs/[/x]", ("model[v2]", "[red]"), [("[bold]a", "[/]")])])
    for text in ("runs/[/x]", "model[v2]", "[red]", "[bold]a", "[/]"):
        assert text in stdout.getvalue()


CURVES = Table(
    "Training loss",
    ("run", "steps in common", "loss now", "gap now", "worst gap"),
    [("decoder.layers.17.run-fp8", "1,200", "6.4896", "+0.02 %", "-inf"), ("b", "12", "6.5", "-", "+1.25 %")],
)


@pytest.mark.parametrize("width", range(30, 100, 5))
def test_a_table_fits_the_terminal_and_breaks_no_number(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Names fold where they must; below that a row is a list of its cells under their heads."""
    stdout = io.StringIO()
    terminal = Console(file=stdout, width=width, highlight=False, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "_out", terminal)
    console.show_tables([CURVES])
    lines = stdout.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    for row in CURVES.rows:
        for cell in row[1:]:
            assert any(cell in line for line in lines), cell
    as_lists = not any("─" in line for line in lines)
    assert as_lists == (width < 52)
    assert not as_lists or sum("loss now" in line for line in lines) == 2


@pytest.mark.parametrize("letters", [5, 30, 70, 119])
def test_a_table_in_a_log_has_whole_names_no_blanks_at_ends_and_120_columns_if_names_allow_it(
    monkeypatch: pytest.MonkeyPatch, letters: int
) -> None:
    stdout, name = io.StringIO(), "n" * letters
    monkeypatch.setattr(console, "_out", Console(file=stdout, width=console._LOG_WIDTH, highlight=False))
    console.show_tables([Table("Title", (name, "count", ""), [("a", "1,000", name), ("b", "-", "reason " * 40)])])
    lines = stdout.getvalue().splitlines()
    assert lines[0] == "Title" and all(line == line.rstrip() for line in lines)
    assert stdout.getvalue().count(name) == 2
    widest = max(map(len, lines))
    assert widest <= 120 if letters <= 50 else 2 * letters < widest <= 2 * letters + 16
